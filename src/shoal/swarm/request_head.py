"""The head of a signed request: which headers it has, which of them are signed, and what they say.

A signature covers method, path, query, run and audience; with a body also its digest and length. Every one of these is
required and nothing else is taken, so what a route acts upon was signed.

The audience is the coordinator's public key in a header, and not `@authority`: a proxy rewrites the authority, one
coordinator has several (loopback, LAN, the public name), and a name says nothing about who answers to it. A request
signed for one coordinator is refused by every other, whatever the way there.

A request without a body covers neither digest nor length: proxies drop `Content-Length: 0` of a GET, and no body can be
added to it, for the length is then 0. Reading a head costs microseconds and keeps nothing.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from shoal.swarm.digest import EMPTY_DIGEST, parse_digest
from shoal.swarm.refusal import AuthError
from shoal.swarm.signature import build_base, derive_components, parse_input, parse_signature

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
"""path and query of RFC 3986; an empty query is refused, for `/a` and `/a?` would be signed alike"""
_LENGTH = re.compile(r"0|[1-9][0-9]{0,14}")
_NODE = re.compile(r"[0-9a-f]{64}")
_NONCE = re.compile(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}")
_OWN_INPUT = re.compile(
    r'([a-z]{1,16})=(\("@method" "@path" "@query" "shoal-run" "shoal-audience"( "content-digest" "content-length")?\)'
    rf';created=([1-9][0-9]{{0,14}});nonce="({_NONCE.pattern})";keyid="({_NODE.pattern})"'
    rf';alg="{ALGORITHM}";tag="{REQUEST_TAG}")'
)
"""what `RequestSigner` writes, read in one pass; every other order takes the general way, to the same result"""


class Claim(NamedTuple):
    """What a `Signature-Input` says."""

    label: str
    components: tuple[str, ...]
    text: str
    node: str
    created_s: int
    nonce: str
    has_body: bool


class RequestHead(NamedTuple):
    """What a request claims; true once the signature over `base` holds."""

    node: str
    created_s: int
    nonce: str
    length: int
    digest: bytes
    base: bytes
    signature: bytes
    work: str
    """stamp of a join, empty if there is none"""


def read_head(method: str, target: str, headers: RawHeaders, run: str, audience: str) -> RequestHead:
    """Read a request's head for this run and audience, or refuse it; the signature is not checked yet."""
    if method not in _METHODS or len(target) > MAX_TARGET_CHARS or _TARGET.fullmatch(target) is None:
        raise _refuse_format("the method or the path of the request is not one that can be signed")
    fields = _pick_fields(headers)
    if "transfer-encoding" in fields:
        raise AuthError(411, "length_required", "a body must come with its Content-Length, not in chunks")
    _check_place(fields, run, audience)
    claim = read_claim(_take_field(fields, "signature-input"))
    label, signature = parse_signature(_take_field(fields, "signature"))
    if label != claim.label:
        raise _refuse_format("Signature and Signature-Input carry different labels")
    length, digest = _read_body(claim.has_body, fields)
    fields.update(derive_components(method, target))
    base = build_base(claim.components, fields, claim.text)
    work = fields.get("shoal-work", "")
    return RequestHead(claim.node, claim.created_s, claim.nonce, length, digest, base, signature, work)


def read_claim(field: str) -> Claim:
    """Read the `Signature-Input` of a request."""
    match = _OWN_INPUT.fullmatch(field)
    if match is None:
        return read_any_claim(field)
    label, text, body, created_s, nonce, node = match.groups()
    components = BARE_COMPONENTS if body is None else BODY_COMPONENTS
    return Claim(label, components, text, node, int(created_s), nonce, body is not None)


def read_any_claim(field: str) -> Claim:
    """The same, whatever the order of components and parameters."""
    given = parse_input(field)
    node, created_s, nonce = _read_parameters(given.parameters)
    covered = frozenset(given.components)
    if covered not in (_BARE, _BODY):
        names = " ".join(BARE_COMPONENTS)
        raise _refuse_format(f"a signature covers {names}, with a body content-digest and content-length, and no more")
    return Claim(given.label, given.components, given.text, node, created_s, nonce, covered == _BODY)


def _pick_fields(headers: RawHeaders) -> dict[str, str]:
    """The headers that matter here, each at most once: two would leave it open which one was meant."""
    if len(headers) > MAX_HEADERS:
        raise AuthError(431, "too_large", f"more than {MAX_HEADERS} headers")
    fields: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name = _USED.get(raw_name.lower())
        if name is None:
            continue
        if len(raw_value) > MAX_VALUE_CHARS:
            raise AuthError(431, "too_large", f"a header of more than {MAX_VALUE_CHARS} characters")
        if name in fields:
            raise _refuse_format("a header that is signed or part of the signature came twice")
        try:
            fields[name] = raw_value.decode("ascii").strip(" \t")
        except UnicodeDecodeError:
            raise _refuse_format("a header that is signed or part of the signature is not ASCII") from None
    return fields


def _take_field(fields: dict[str, str], name: str) -> str:
    value = fields.get(name)
    if value is None:
        raise AuthError(401, "unsigned", f"the request has no header {name}; every request here must be signed")
    return value


def _check_place(fields: dict[str, str], run: str, audience: str) -> None:
    if _take_field(fields, "shoal-run") != run:
        raise AuthError(421, "other_run", f"this request is for another run; here is run {run}")
    if _take_field(fields, "shoal-audience") != audience:
        text = f"this request is for another coordinator; the key of this one is {audience}"
        raise AuthError(421, "other_audience", text)


def _read_parameters(parameters: dict[str, int | str]) -> tuple[str, int, str]:
    if parameters.keys() != _PARAMETERS:
        raise _refuse_format("Signature-Input must have created, nonce, keyid, alg and tag, and no other parameter")
    created_s, nonce, node = parameters["created"], parameters["nonce"], parameters["keyid"]
    if parameters["tag"] != REQUEST_TAG or parameters["alg"] != ALGORITHM:
        raise _refuse_format(f'a request is signed with alg="{ALGORITHM}" and tag="{REQUEST_TAG}"')
    assert isinstance(created_s, int) and isinstance(nonce, str) and isinstance(node, str), "the parser sees to types"
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
        raise _refuse_format("a body must come with its Content-Length and Content-Digest")
    return int(length), parse_digest(digest)


def _refuse_format(text: str) -> AuthError:
    return AuthError(400, "malformed", text)
