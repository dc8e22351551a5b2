"""HTTP Message Signatures (RFC 9421), the part that requests of ours need, with the structured fields (RFC 8941) in it.

Invariants:
- one spelling: a `Signature-Input` is taken only in the form in which it would be written (one space between
  components, none elsewhere, no parameter twice), so the text received is the text signed;
- a component is a plain name: flags such as `;sf`, `;bs`, `;req` and `;name` are refused, not skipped;
- nothing but `AuthError` comes out of parsing, and time and memory are linear in a text of bounded length.
"""

import re
from base64 import b64encode
from binascii import a2b_base64
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.keys import SIGNATURE_BYTES
from shoal.swarm.refusal import AuthError

MAX_INPUT_CHARS = 1024
MAX_LABEL_CHARS = 32
Parameter = int | str

_LABEL = r"[a-z*][a-z0-9_.*-]*"
_COMPONENT = r'"@?[a-z0-9][a-z0-9-]*"'
_INTEGER = r"0|-?[1-9][0-9]{0,14}"
_STRING = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
_INPUT = re.compile(rf"({_LABEL})=(\(((?:{_COMPONENT}(?: {_COMPONENT})*)?)\)((?:;[a-z]+=(?:{_INTEGER}|{_STRING}))*))")
_PARAMETER = re.compile(rf";([a-z]+)=(?:({_INTEGER})|({_STRING}))")
_SIGNATURE = re.compile(rf"({_LABEL})=:([A-Za-z0-9+/]{{85}}[AQgw]==):")
"""64 bytes in base64: the last of 86 characters carries two bits, so four characters are its only spellings"""
_ESCAPED = re.compile(r'[\\"]')
_INTEGERS = frozenset({"created", "expires"})
_STRINGS = frozenset({"nonce", "alg", "keyid", "tag"})


class SignatureInput(NamedTuple):
    """What a signature covers, and the words that go with it."""

    label: str
    components: tuple[str, ...]
    parameters: dict[str, Parameter]
    text: str
    """components and parameters as written: the last line of what is signed"""


def parse_input(field: str) -> SignatureInput:
    """Read the value of a `Signature-Input` field with one signature in it."""
    match = _INPUT.fullmatch(field) if len(field) <= MAX_INPUT_CHARS else None
    if match is None or len(match[1]) > MAX_LABEL_CHARS:
        raise _refuse_format("Signature-Input must hold one signature, in the form of RFC 9421 without extra spaces")
    label, text, names, tail = match.groups()
    components = tuple(names[1:-1].split('" "')) if names else ()
    if len(set(components)) != len(components):
        raise _refuse_format("Signature-Input names a component twice")
    return SignatureInput(label, components, _parse_parameters(tail), text)


def format_input(components: Sequence[str], parameters: Mapping[str, Parameter]) -> str:
    """Components and parameters as they stand in `Signature-Input` after the label."""
    names = " ".join(f'"{name}"' for name in components)
    return f"({names})" + "".join(f";{name}={_format_parameter(value)}" for name, value in parameters.items())


def parse_signature(field: str) -> tuple[str, bytes]:
    """Read the value of a `Signature` field: its label and the 64 bytes."""
    match = _SIGNATURE.fullmatch(field) if len(field) <= MAX_INPUT_CHARS else None
    if match is None:
        raise _refuse_format(f"Signature must hold one signature of {SIGNATURE_BYTES} bytes, in the form of RFC 9421")
    return match[1], a2b_base64(match[2])


def format_signature(label: str, signature: bytes) -> str:
    """The value of a `Signature` field."""
    return f"{label}=:{b64encode(signature).decode()}:"


def build_base(components: Sequence[str], values: Mapping[str, str], text: str) -> bytes:
    """The bytes that are signed (RFC 9421, section 2.5): a line for each component, then the parameters."""
    lines = []
    for name in components:
        value = values.get(name)
        if value is None:
            raise _refuse_format("the signature covers what this request does not have, or what is not supported here")
        # a line break in a value would let one message be read as another
        if not value.isascii() or not value.isprintable() or value != value.strip():
            raise _refuse_format("a signed part of the request holds other than printable ASCII, or spaces around it")
        lines.append(f'"{name}": {value}\n')
    return f'{"".join(lines)}"@signature-params": {text}'.encode("ascii")


def derive_components(method: str, target: str) -> dict[str, str]:
    """The components that a request's first line gives (section 2.2), as sent: nothing is decoded or resolved."""
    path, _, query = target.partition("?")
    return {"@method": method, "@path": path or "/", "@query": f"?{query}"}


def _parse_parameters(tail: str) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = {}
    for name, integer, string in _PARAMETER.findall(tail):
        if name in parameters:
            raise _refuse_format("Signature-Input has a parameter twice")
        if name not in (_INTEGERS if integer else _STRINGS):
            raise _refuse_format("Signature-Input has a parameter that RFC 9421 does not know in this form")
        if integer:
            parameters[name] = int(integer)
        else:
            parameters[name] = re.sub(r"\\(.)", r"\1", string[1:-1]) if "\\" in string else string[1:-1]
    return parameters


def _format_parameter(value: Parameter) -> str:
    if isinstance(value, int):
        return str(value)
    return '"' + _ESCAPED.sub(r"\\\g<0>", value) + '"'


def _refuse_format(text: str) -> AuthError:
    return AuthError(400, "malformed", text)
