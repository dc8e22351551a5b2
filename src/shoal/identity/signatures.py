"""Signed requests: HTTP Message Signatures (RFC 9421) and body digests (RFC 9530), the part that shoal needs.

A signature covers method, path, query, run and audience; with a body also its digest and length. All of these are
required and nothing else is accepted, so everything a route acts on was signed.

The audience is the coordinator's public key in a header, not `@authority`: a proxy rewrites the authority, one
coordinator has several (loopback, LAN, the public name), and a host name does not identify the key behind it. A request
signed for one coordinator is refused by every other, whatever the route to it.

Invariants:
- one spelling: a `Signature-Input` is accepted only in its canonical form (one space between components, none
  elsewhere, no duplicate parameters), so the text received is the text signed;
- a component is a plain name: flags such as `;sf`, `;bs`, `;req` and `;name` are refused, not ignored;
- parsing raises only `ApiError`, stores nothing, and takes time and memory linear in a text of bounded length;
- a request without a body covers neither digest nor length: proxies drop `Content-Length: 0` of a GET, and no body can
  be added, because the length is then 0;
- a body is read after its head was verified, piece by piece, and fails at the first byte past the declared length.

Responses: a server signs its answer together with the request it answers (sections 2.4 and 2.5):

    "@status": 200
    "content-digest": sha-256=:...:
    "@method";req: POST
    "@path";req: /v1/claims
    "@query";req: ?
    "shoal-run";req: demo
    "shoal-audience";req: <the server's public key>
    "content-digest";req, "content-length";req      if the request has a body
    "shoal-work";req                                if the request carries a proof of work
    "signature-input";req, "signature";req          node, time and nonce of the request, and its signature
    "@signature-params": (...);created=...;keyid="<the server's public key>";alg="ed25519";tag="shoal-response-1"

Invariants:
- every signed request gets a signed answer, refusals included. A client accepts one only for the request it sent: the
  nonce in its `Signature-Input` makes the signature a different one each time, so an answer to an earlier request, to
  another node or to an altered request does not verify;
- everything in the head of a request that can change the answer is covered, so nobody obtains a genuine refusal for a
  client by altering its request on the way (for example with the id of a banned node);
- a public route does not check who asks, so a client without a key signs with a key made for the occasion.

What cannot be covered is when and how often a request is delivered and whether its body arrives intact. Refusals for
these reasons (`TRANSIT_CODES`) are repeated under a new signature, like no answer at all.
"""

import hashlib
import re
from base64 import b64encode
from binascii import a2b_base64
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shoal.identity.keys import SIGNATURE_BYTES, Key, verify_signature
from shoal.net.api_error import ApiError

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
"""64 bytes in base64: the last of 86 characters carries two bits, so it can only be one of four characters"""
_ESCAPED = re.compile(r'[\\"]')
_INTEGERS = frozenset({"created", "expires"})
_STRINGS = frozenset({"nonce", "alg", "keyid", "tag"})


class SignatureInput(NamedTuple):
    """What a signature covers, and its parameters."""

    label: str
    components: tuple[str, ...]
    parameters: dict[str, Parameter]
    text: str
    """components and parameters as written: the last line of the signed text"""


def parse_input(field: str) -> SignatureInput:
    """Parse a `Signature-Input` field with one signature."""
    match = _INPUT.fullmatch(field) if len(field) <= MAX_INPUT_CHARS else None
    if match is None or len(match[1]) > MAX_LABEL_CHARS:
        raise _refuse_format("Signature-Input must hold one signature, in the form of RFC 9421 without extra spaces")
    label, text, names, tail = match.groups()
    components = tuple(names[1:-1].split('" "')) if names else ()
    if len(set(components)) != len(components):
        raise _refuse_format("duplicate component in Signature-Input")
    return SignatureInput(label, components, _parse_parameters(tail), text)


def format_input(components: Sequence[str], parameters: Mapping[str, Parameter]) -> str:
    """Components and parameters as written in `Signature-Input` after the label."""
    names = " ".join(f'"{name}"' for name in components)
    return f"({names})" + "".join(f";{name}={_format_parameter(value)}" for name, value in parameters.items())


def parse_signature(field: str) -> tuple[str, bytes]:
    """Parse a `Signature` field: its label and the 64 bytes."""
    match = _SIGNATURE.fullmatch(field) if len(field) <= MAX_INPUT_CHARS else None
    if match is None:
        raise _refuse_format(f"Signature must hold one signature of {SIGNATURE_BYTES} bytes, in the form of RFC 9421")
    return match[1], a2b_base64(match[2])


def format_signature(label: str, signature: bytes) -> str:
    """The value of a `Signature` field."""
    return f"{label}=:{b64encode(signature).decode()}:"


def build_base(components: Sequence[str], values: Mapping[str, str], text: str) -> bytes:
    """The bytes to sign (RFC 9421, section 2.5): a line for each component, then the parameters."""
    lines = []
    for name in components:
        value = values.get(name)
        if value is None:
            raise _refuse_format("the signature covers a component that is missing or not supported")
        # A line break in a value would make one message look like another.
        if not value.isascii() or not value.isprintable() or value != value.strip():
            raise _refuse_format("a signed part of the request has surrounding spaces or is not printable ASCII")
        lines.append(f'"{name}": {value}\n')
    return f'{"".join(lines)}"@signature-params": {text}'.encode("ascii")


def derive_components(method: str, target: str) -> dict[str, str]:
    """The components from a request's first line (section 2.2), as sent: nothing is decoded or resolved."""
    path, _, query = target.partition("?")
    return {"@method": method, "@path": path or "/", "@query": f"?{query}"}


def _parse_parameters(tail: str) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = {}
    for name, integer, string in _PARAMETER.findall(tail):
        if name in parameters:
            raise _refuse_format("duplicate parameter in Signature-Input")
        if name not in (_INTEGERS if integer else _STRINGS):
            raise _refuse_format("Signature-Input has a parameter that RFC 9421 does not define in this form")
        if integer:
            parameters[name] = int(integer)
        else:
            parameters[name] = re.sub(r"\\(.)", r"\1", string[1:-1]) if "\\" in string else string[1:-1]
    return parameters


def _format_parameter(value: Parameter) -> str:
    if isinstance(value, int):
        return str(value)
    return '"' + _ESCAPED.sub(r"\\\g<0>", value) + '"'


def _refuse_format(text: str) -> ApiError:
    return ApiError(400, "malformed", text)


EMPTY_DIGEST = hashlib.sha256().digest()
_FIELD = re.compile(r"sha-256=:([A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=):")
"""32 bytes in base64: the last of 43 characters carries four bits"""


def format_digest(digest: bytes) -> str:
    """The value of `Content-Digest` for a SHA-256 hash."""
    return f"sha-256=:{b64encode(digest).decode()}:"


def parse_digest(field: str) -> bytes:
    """The SHA-256 hash in a `Content-Digest`; additional hashes are refused, because nothing would check them."""
    match = _FIELD.fullmatch(field)
    if match is None:
        raise ApiError(400, "malformed", "Content-Digest must be one sha-256, in the form of RFC 9530")
    return a2b_base64(match[1])


class BodyChecker:
    """Compares a body, as it arrives, with the length and digest that were signed."""

    def __init__(self, length: int, digest: bytes) -> None:
        self.length = length
        self.num_bytes = 0
        self._digest = digest
        self._hash = hashlib.sha256()

    def feed(self, chunk: bytes) -> None:
        """Add the next piece; it may be used only once `finish` has returned."""
        self.num_bytes += len(chunk)
        if self.num_bytes > self.length:
            raise ApiError(400, "body", f"the body is longer than the {self.length} bytes that were signed")
        self._hash.update(chunk)

    def finish(self) -> None:
        """Check the complete body."""
        if self.num_bytes < self.length:
            raise ApiError(400, "body", f"the body ended after {self.num_bytes} of the {self.length} bytes signed")
        if self._hash.digest() != self._digest:
            raise ApiError(400, "body", "the body does not match the signed digest")


REQUEST_TAG = "shoal-request-1"
ALGORITHM = "ed25519"
LABEL = "shoal"
BARE_COMPONENTS = ("@method", "@path", "@query", "shoal-run", "shoal-audience")
BODY_COMPONENTS = (*BARE_COMPONENTS, "content-digest", "content-length")
MAX_HEADERS = 64
MAX_TARGET_CHARS = 1024
MAX_VALUE_CHARS = 1024
NONCE_BYTES = 16
RawHeaders = Sequence[tuple[bytes, bytes]]

_BARE, _BODY = frozenset(BARE_COMPONENTS), frozenset(BODY_COMPONENTS)
_PARAMETERS = {"created", "nonce", "keyid", "alg", "tag"}
_USED = {
    name.encode(): name
    for name in (
        "signature-input",
        "signature",
        "shoal-run",
        "shoal-audience",
        "shoal-work",
        "content-digest",
        "content-length",
        "transfer-encoding",
    )
}
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})
_TARGET = re.compile(r"/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*(?:\?[A-Za-z0-9._~!$&'()*+,;=:@%/?-]+)?")
"""path and query of RFC 3986; an empty query is refused, because `/a` and `/a?` would have the same signature"""
_LENGTH = re.compile(r"0|[1-9][0-9]{0,14}")
_NODE = re.compile(r"[0-9a-f]{64}")
_NONCE = re.compile(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}")
_OWN_INPUT = re.compile(
    r'([a-z]{1,16})=(\("@method" "@path" "@query" "shoal-run" "shoal-audience"( "content-digest" "content-length")?\)'
    rf';created=([1-9][0-9]{{0,14}});nonce="({_NONCE.pattern})";keyid="({_NODE.pattern})"'
    rf';alg="{ALGORITHM}";tag="{REQUEST_TAG}")'
)
"""what `RequestSigner` writes, parsed in one pass; any other order takes the general path, with the same result"""


class SignatureClaim(NamedTuple):
    """The parsed `Signature-Input`."""

    label: str
    components: tuple[str, ...]
    text: str
    node: str
    created_s: int
    nonce: str
    has_body: bool


class RequestHead(NamedTuple):
    """What a request claims; true once the signature over `base` is verified."""

    node: str
    created_s: int
    nonce: str
    length: int
    digest: bytes
    base: bytes
    signature: bytes
    work: str
    """proof-of-work stamp of a join, empty in other requests"""


def read_head(method: str, target: str, headers: RawHeaders, run: str, audience: str) -> RequestHead:
    """Parse a request's head for this run and audience; the signature is not checked yet."""
    if method not in _METHODS or len(target) > MAX_TARGET_CHARS or _TARGET.fullmatch(target) is None:
        raise _refuse_format("the method or the path of the request cannot be signed")
    fields = _pick_fields(headers)
    if "transfer-encoding" in fields:
        raise ApiError(411, "length_required", "a body requires Content-Length; chunked encoding is not supported")
    _check_place(fields, run, audience)
    claim = read_claim(_take_field(fields, "signature-input"))
    label, signature = parse_signature(_take_field(fields, "signature"))
    if label != claim.label:
        raise _refuse_format("Signature and Signature-Input have different labels")
    length, digest = _read_body(claim.has_body, fields)
    fields.update(derive_components(method, target))
    base = build_base(claim.components, fields, claim.text)
    work = fields.get("shoal-work", "")
    return RequestHead(claim.node, claim.created_s, claim.nonce, length, digest, base, signature, work)


def read_claim(field: str) -> SignatureClaim:
    """Parse the `Signature-Input` of a request."""
    match = _OWN_INPUT.fullmatch(field)
    if match is None:
        return read_any_claim(field)
    label, text, body, created_s, nonce, node = match.groups()
    components = BARE_COMPONENTS if body is None else BODY_COMPONENTS
    return SignatureClaim(label, components, text, node, int(created_s), nonce, body is not None)


def read_any_claim(field: str) -> SignatureClaim:
    """The same for any order of components and parameters."""
    given = parse_input(field)
    node, created_s, nonce = _read_parameters(given.parameters)
    covered = frozenset(given.components)
    if covered not in (_BARE, _BODY):
        names = " ".join(BARE_COMPONENTS)
        raise _refuse_format(f"a signature must cover {names}, and with a body content-digest and content-length")
    return SignatureClaim(given.label, given.components, given.text, node, created_s, nonce, covered == _BODY)


def _pick_fields(headers: RawHeaders) -> dict[str, str]:
    """The relevant headers, each at most once: duplicates would be ambiguous."""
    if len(headers) > MAX_HEADERS:
        raise ApiError(431, "too_large", f"more than {MAX_HEADERS} headers")
    fields: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name = _USED.get(raw_name.lower())
        if name is None:
            continue
        if len(raw_value) > MAX_VALUE_CHARS:
            raise ApiError(431, "too_large", f"a header has more than {MAX_VALUE_CHARS} characters")
        if name in fields:
            raise _refuse_format("duplicate header that is signed or part of the signature")
        try:
            fields[name] = raw_value.decode("ascii").strip(" \t")
        except UnicodeDecodeError:
            raise _refuse_format("a header that is signed or part of the signature is not ASCII") from None
    return fields


def _take_field(fields: dict[str, str], name: str) -> str:
    value = fields.get(name)
    if value is None:
        raise ApiError(401, "unsigned", f"missing header {name}; every request here must be signed")
    return value


def _check_place(fields: dict[str, str], run: str, audience: str) -> None:
    if _take_field(fields, "shoal-run") != run:
        raise ApiError(421, "other_run", f"this request is for another run; this is run {run}")
    if _take_field(fields, "shoal-audience") != audience:
        text = f"this request is for another coordinator; the key of this one is {audience}"
        raise ApiError(421, "other_audience", text)


def _read_parameters(parameters: dict[str, int | str]) -> tuple[str, int, str]:
    if parameters.keys() != _PARAMETERS:
        raise _refuse_format("Signature-Input must have created, nonce, keyid, alg and tag, and no other parameter")
    created_s, nonce, node = parameters["created"], parameters["nonce"], parameters["keyid"]
    if parameters["tag"] != REQUEST_TAG or parameters["alg"] != ALGORITHM:
        raise _refuse_format(f'a request must be signed with alg="{ALGORITHM}" and tag="{REQUEST_TAG}"')
    assert isinstance(created_s, int) and isinstance(nonce, str) and isinstance(node, str), "the parser checks types"
    if _NODE.fullmatch(node) is None:
        raise _refuse_format("keyid must be the node's public key, 64 of the characters 0-9 and a-f")
    if _NONCE.fullmatch(nonce) is None:
        raise _refuse_format(f"nonce must be {NONCE_BYTES} random bytes, in characters 0-9 and a-f")
    return node, created_s, nonce


def _read_body(has_body: bool, fields: dict[str, str]) -> tuple[int, bytes]:
    if not has_body:
        if fields.get("content-length", "0") != "0":
            raise _refuse_format("the request has a body that its signature does not cover")
        return 0, EMPTY_DIGEST
    length, digest = fields.get("content-length"), fields.get("content-digest")
    if length is None or digest is None or _LENGTH.fullmatch(length) is None:
        raise _refuse_format("a body requires Content-Length and Content-Digest")
    return int(length), parse_digest(digest)


RESPONSE_TAG = "shoal-response-1"
_TOKENS = ("signature-input", "signature")
_ALWAYS = frozenset({"shoal-run", "shoal-audience", *_TOKENS})
_BOUND = {name.encode(): name for name in (*BODY_COMPONENTS[3:], "shoal-work", *_TOKENS)}
"""headers of a request that its answer covers"""
_CREATED = re.compile(r";created=([1-9][0-9]{0,14});")


class ResponseSigner:
    """Signs the answers of one server."""

    def __init__(self, key: Key, run: str, clock_ms: Callable[[], int]) -> None:
        self._key, self._run, self._clock_ms = key, run, clock_ms

    def sign_response(
        self, method: str, target: str, request: RawHeaders, status: int, body: bytes
    ) -> list[tuple[bytes, bytes]]:
        """The headers to add to an answer; none for a request that is not signed, or is for another run or server."""
        values = _pick_values(request)
        if values is None or (values["shoal-run"], values["shoal-audience"]) != (self._run, self._key.public):
            return []
        if _TARGET.fullmatch(target) is None:
            return []  # no client of ours sends it
        digest = format_digest(hashlib.sha256(body).digest())
        names, base = _build_response_base(method, target, values, status, digest)
        text = _format_response_input(names, self._clock_ms() // 1000, self._key.public)
        signature = self._key.sign(f'{base}"@signature-params": {text}'.encode("ascii"))
        return [
            (b"content-digest", digest.encode()),
            (b"signature-input", f"{LABEL}={text}".encode()),
            (b"signature", format_signature(LABEL, signature).encode()),
        ]


def verify_response(
    server: str, method: str, target: str, request: RawHeaders, status: int, body: bytes, signed: tuple[str, str]
) -> bool:
    """Whether this server signed this answer to this request; `signed`: its Signature-Input and Signature."""
    values = _pick_values(request)
    created = _CREATED.search(signed[0][:MAX_INPUT_CHARS])
    if values is None or created is None:
        return False
    digest = format_digest(hashlib.sha256(body).digest())
    names, base = _build_response_base(method, target, values, status, digest)
    text = _format_response_input(names, int(created[1]), server)
    if signed[0] != f"{LABEL}={text}":
        return False
    try:
        label, signature = parse_signature(signed[1])
    except ApiError:
        return False
    data = f'{base}"@signature-params": {text}'.encode("ascii")
    return label == LABEL and verify_signature(server, data, signature)


def _pick_values(headers: RawHeaders) -> dict[str, str] | None:
    """The headers of a request that its answer covers; None without a signature, or if one of them is ambiguous."""
    values: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name = _BOUND.get(raw_name.lower())
        if name is None:
            continue
        value = raw_value.decode("latin-1").strip(" \t")
        is_visible = value and value.isascii() and value.isprintable()
        if name in values or len(value) > MAX_VALUE_CHARS or not is_visible:
            return None
        values[name] = value
    return values if values.keys() >= _ALWAYS else None


def _build_response_base(
    method: str, target: str, values: Mapping[str, str], status: int, digest: str
) -> tuple[tuple[str, ...], str]:
    """The covered parts of the request, and all lines to sign but the last."""
    parts = BODY_COMPONENTS if "content-digest" in values else BARE_COMPONENTS
    names = (*parts, "shoal-work", *_TOKENS) if "shoal-work" in values else (*parts, *_TOKENS)
    given = {**values, **derive_components(method, target)}
    lines = "".join([f'"{name}";req: {given.get(name, "")}\n' for name in names])
    return names, f'"@status": {status}\n"content-digest": {digest}\n{lines}'


def _format_response_input(names: tuple[str, ...], created_s: int, server: str) -> str:
    covered = " ".join([f'"{name}";req' for name in names])
    return (
        f'("@status" "content-digest" {covered});created={created_s};keyid="{server}";alg="{ALGORITHM}"'
        f';tag="{RESPONSE_TAG}"'
    )
