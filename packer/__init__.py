"""The work: sources to packed Arrow shards. No web framework, no torch."""
