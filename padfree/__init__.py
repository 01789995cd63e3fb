"""The command. Everything else is in `packer`, `service` and `trainer_client`."""

__version__ = "0.1.0"
