"""The door: FastAPI over a store of packed datasets. Never torch."""
