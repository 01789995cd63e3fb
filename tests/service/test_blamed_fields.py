"""The field that a problem blames is named once."""

from __future__ import annotations

import argparse
import io
import json
import urllib.error
from email.message import Message

import pytest

from padfree.cli.common import _problem
from service import problems


@pytest.mark.parametrize("field", ["tokenizer.path", "tokenizer.add_bos"])
def test_a_tokenizers_error_says_itself_which_field_is_to_blame(field: str) -> None:
    found = problems.bad_spec("tokenizer.path", f"{field}: a folder is required")
    assert (found.field, found.detail) == (field, "a folder is required")


@pytest.mark.parametrize("detail", ["a folder is required", "tokenizer.path: a folder is required"])
def test_the_command_line_names_a_field_once(detail: str) -> None:
    body = io.BytesIO(json.dumps({"field": "tokenizer.path", "detail": detail}).encode())
    error = urllib.error.HTTPError("http://x", 422, "Unprocessable", Message(), body)
    args = argparse.Namespace(url="http://x", token=None)
    assert str(_problem(error, args, "/v1/datasets")) == "tokenizer.path: a folder is required"
