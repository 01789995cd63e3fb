"""Rows to token ids with a loss mask: texts, prompts with completions, conversations, ready ids.

renderer.py is the way in. A conversation goes through conversations.py (what templates want), chats.py and
templates.py (its text) and turns.py (where the assistant's words are in it); ready.py takes rows that are
token ids already.
"""

from packer.render.renderer import LOSSES, Rendered, Renderer
from packer.render.templates import RenderError, RowProblem

__all__ = ["LOSSES", "RenderError", "Rendered", "Renderer", "RowProblem"]
