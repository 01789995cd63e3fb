"""The file of a SentencePiece model, read by the protobuf library.

The fields are declared here: the sentencepiece package has a module made for it, but that asks for a
protobuf as new as itself, and the package is not needed otherwise. Ray brings protobuf.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from packer.tokenization.convert.values import ConversionError

_Field = descriptor_pb2.FieldDescriptorProto
_TEXT, _BYTES, _FLAG, _WHOLE, _REAL = (
    _Field.TYPE_STRING,
    _Field.TYPE_BYTES,
    _Field.TYPE_BOOL,
    _Field.TYPE_INT32,
    _Field.TYPE_FLOAT,
)
# sentencepiece_model.proto, as far as it is used: name, number, type, default.
_FIELDS: dict[str, list[tuple[str, int, Any, str]]] = {
    "Piece": [("piece", 1, _TEXT, ""), ("score", 2, _REAL, "0"), ("type", 3, _WHOLE, "1")],
    "Trainer": [
        ("model_type", 3, _WHOLE, "1"),
        ("treat_whitespace_as_suffix", 24, _FLAG, "false"),
        ("byte_fallback", 35, _FLAG, "false"),
        ("unk_id", 40, _WHOLE, "0"),
        ("bos_id", 41, _WHOLE, "1"),
        ("eos_id", 42, _WHOLE, "2"),
        ("pad_id", 43, _WHOLE, "-1"),
    ],
    "Normalizer": [
        ("name", 1, _TEXT, ""),
        ("precompiled_charsmap", 2, _BYTES, ""),
        ("add_dummy_prefix", 3, _FLAG, "true"),
        ("remove_extra_whitespaces", 4, _FLAG, "true"),
        ("escape_whitespaces", 5, _FLAG, "true"),
    ],
}
_PARTS = [("pieces", 1, "Piece"), ("trainer", 2, "Trainer"), ("normalizer", 3, "Normalizer")]
# Of sentencepiece.proto: a text that was encoded; begin and end in bytes.
_FIELDS["Token"] = [("id", 2, _WHOLE, "0"), ("begin", 4, _WHOLE, "0"), ("end", 5, _WHOLE, "0")]


@lru_cache(maxsize=1)
def _messages() -> tuple[Any, Any]:
    """The classes of models and of texts."""
    file = descriptor_pb2.FileDescriptorProto(name="padfree.proto", package="padfree", syntax="proto2")
    for name, fields in _FIELDS.items():
        part = file.message_type.add(name=name)
        for field, number, kind, default in fields:
            part.field.add(name=field, number=number, type=kind, default_value=default, label=1)
    model = file.message_type.add(name="Model")
    for field, number, kind in _PARTS:
        label = 3 if field == "pieces" else 1  # repeated, or optional
        model.field.add(
            name=field, number=number, type=_Field.TYPE_MESSAGE, type_name=f".padfree.{kind}", label=label
        )
    text = file.message_type.add(name="Text")
    text.field.add(name="pieces", number=2, type=_Field.TYPE_MESSAGE, type_name=".padfree.Token", label=3)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"padfree.{name}") for name in ("Model", "Text"))
    model_class, text_class = map(message_factory.GetMessageClass, found)
    return model_class, text_class


def read_model(data: bytes, name: str) -> Any:
    """The model: pieces (piece, score, type), trainer, normalizer. Raises ConversionError."""
    try:
        model = _messages()[0].FromString(data)
    except Exception as error:  # DecodeError, UnicodeDecodeError: by the implementation that is there
        raise ConversionError(
            f"{name}: a SentencePiece model is required, found a file that is none "
            f"({str(error)[:80] or type(error).__name__}); copy the file again"
        ) from error
    if not model.pieces or not any(piece.piece for piece in model.pieces):
        raise ConversionError(
            f"{name}: a SentencePiece model holds pieces, this file has none; copy the file again"
        )
    return model


def read_text(data: bytes) -> Any:
    """What the library gives for a text: pieces (id, begin, end)."""
    return _messages()[1].FromString(data)
