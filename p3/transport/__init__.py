"""How bytes travel: the interface, an in-process twin for one-process jobs, and ZeroMQ."""

from p3.transport.interface import Buffer, Channel, Message, Port

__all__ = ["Buffer", "Channel", "Message", "Port"]
