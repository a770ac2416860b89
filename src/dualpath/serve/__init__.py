"""The front: OpenAI API, control plane, request life cycle."""

from dualpath.serve.front import Front
from dualpath.serve.run import serve

__all__ = ["Front", "serve"]
