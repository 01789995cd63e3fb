"""The parts of benchmarks/paper.py: the experiment of arXiv 2407.09105, from files to tables."""
