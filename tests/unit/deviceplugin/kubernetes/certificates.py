"""Self-made X.509 certificates (ECDSA over P-256) for servers and clients of tests. Slow, and safe for nothing else."""

import base64
import hashlib
import ipaddress
import secrets
from dataclasses import dataclass

# The curve of FIPS 186-4 D.1.2.3: field, coefficient a, order, base point.
_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
_Point = tuple[int, int] | None
_EC, _P256, _SIGNATURE = "1.2.840.10045.2.1", "1.2.840.10045.3.1.7", "1.2.840.10045.4.3.2"
_NAME, _BASIC, _ALT = "2.5.4.3", "2.5.29.19", "2.5.29.17"


@dataclass(frozen=True)
class Certificate:
    """A certificate with its private key, both as PEM."""

    name: str
    key: int
    pem: bytes = b""

    @property
    def key_pem(self) -> bytes:
        secret = _der(0x04, self.key.to_bytes(32, "big"))
        return _pem("EC PRIVATE KEY", _sequence(_integer(1), secret, _der(0xA0, _oid(_P256))))

    @property
    def chain(self) -> bytes:
        return self.pem + self.key_pem


def certificate(name: str, *addresses: str, issuer: Certificate | None = None, years: str = "20") -> Certificate:
    """A certificate for IP addresses and DNS names, signed by `issuer`, or by itself: then it may sign others.

    Args:
        years: first two digits of the year it ends in; 19 is long ago.
    """
    made = Certificate(name, 1 + secrets.randbelow(_N - 1))
    signer = issuer or made
    algorithm = _sequence(_oid(_SIGNATURE))
    extensions = [_extension(_BASIC, _sequence(*([] if issuer else [_der(0x01, b"\xff")])))]
    if addresses:
        extensions.append(_extension(_ALT, _sequence(*map(_alternative, addresses))))
    body = _sequence(
        _der(0xA0, _integer(2)),
        _integer(secrets.randbits(64)),
        algorithm,
        _distinguished(signer.name),
        _sequence(_der(0x18, b"19700101000000Z"), _der(0x18, f"{years}991231235959Z".encode())),
        _distinguished(name),
        _sequence(_sequence(_oid(_EC), _oid(_P256)), _bits(_public(made.key))),
        _der(0xA3, _sequence(*extensions)),
    )
    signed = _sequence(body, algorithm, _bits(_sign(signer.key, body)))
    return Certificate(name, made.key, _pem("CERTIFICATE", signed))


def _add(left: _Point, right: _Point) -> _Point:
    if left is None or right is None:
        return left or right
    if left[0] == right[0] and (left[1] + right[1]) % _P == 0:
        return None
    if left == right:
        slope = (3 * left[0] * left[0] - 3) * pow(2 * left[1], -1, _P)
    else:
        slope = (right[1] - left[1]) * pow(right[0] - left[0], -1, _P)
    x = (slope * slope - left[0] - right[0]) % _P
    return x, (slope * (left[0] - x) - left[1]) % _P


def _times(factor: int) -> tuple[int, int]:
    total: _Point = None
    power: _Point = _G
    while factor:
        if factor & 1:
            total = _add(total, power)
        power, factor = _add(power, power), factor >> 1
    assert total is not None
    return total


def _public(key: int) -> bytes:
    x, y = _times(key)
    return b"\x04" + x.to_bytes(32, "big") + y.to_bytes(32, "big")


def _sign(key: int, data: bytes) -> bytes:
    digest = int.from_bytes(hashlib.sha256(data).digest(), "big")
    nonce = 1 + secrets.randbelow(_N - 1)
    r = _times(nonce)[0] % _N
    s = pow(nonce, -1, _N) * (digest + r * key) % _N
    return _sequence(_integer(r), _integer(s))


def _der(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(length))) + length + content


def _sequence(*parts: bytes) -> bytes:
    return _der(0x30, b"".join(parts))


def _integer(value: int) -> bytes:
    return _der(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _bits(content: bytes) -> bytes:
    return _der(0x03, b"\0" + content)


def _oid(dotted: str) -> bytes:
    first, second, *rest = map(int, dotted.split("."))
    content = bytearray([40 * first + second])
    for number in rest:
        septets = [number & 0x7F]
        while number := number >> 7:
            septets.append(0x80 | number & 0x7F)
        content += bytes(reversed(septets))
    return _der(0x06, bytes(content))


def _distinguished(name: str) -> bytes:
    return _sequence(_der(0x31, _sequence(_oid(_NAME), _der(0x0C, name.encode()))))


def _extension(oid: str, value: bytes) -> bytes:
    return _sequence(_oid(oid), _der(0x04, value))


def _alternative(address: str) -> bytes:
    try:
        return _der(0x87, ipaddress.ip_address(address).packed)
    except ValueError:
        return _der(0x82, address.encode())


def _pem(label: str, content: bytes) -> bytes:
    text = base64.encodebytes(content).decode().replace("\n", "")
    lines = [text[at : at + 64] for at in range(0, len(text), 64)]
    return "\n".join((f"-----BEGIN {label}-----", *lines, f"-----END {label}-----", "")).encode()
