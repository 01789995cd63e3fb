"""What answers where no padfree service does: proxies, other servers, other protocols."""

from __future__ import annotations

import html
import http.client
import re
import ssl

_MOST_CHARACTERS = 200
# What OpenSSL's releases call it where the other side does not speak TLS.
_NO_TLS = {
    "WRONG_VERSION_NUMBER",
    "RECORD_LAYER_FAILURE",
    "HTTP_REQUEST",
    "UNKNOWN_PROTOCOL",
    "PACKET_LENGTH_TOO_LONG",
}


def why_never(url: str, error: BaseException) -> str:
    """Why no further try at a service that has not answered yet will do better, and what to do; "" where one
    may."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {url} cannot be verified ({error.verify_message}): give the host name that "
            "it is for, or name a file with the authority that signed it in the environment (SSL_CERT_FILE)"
        )
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        return (
            f"a TLS server is required at {url}, found one that does not speak TLS: give "
            f"http{url.removeprefix('https')}, or the port of the proxy that has the certificate"
        )
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, ConnectionError):
        begin = str(error).strip()[:40]
        if begin.startswith("HTTP/") or "HTTP/".startswith(begin):
            return ""  # cut off in its first line
        return (
            f"an HTTP server is required at {url}, found one that answers {begin!r}; is this the url and "
            "port of a padfree service? (https:// where its proxy has a certificate)"
        )
    return ""


def without_v1(url: str) -> str:
    """What to do about a 404 where `url` names the API and not the service; "" where it does not."""
    base = url.rstrip("/")
    return f"give the url without /v1: {base.removesuffix('/v1')}" if base.endswith("/v1") else ""


def first_words(body: bytes, status: int) -> str:
    """The beginning of an error's body on one line: of a page its title, else its text without tags. The
    status is left out where it only repeats the answer's."""
    text = body.decode(errors="replace")
    if re.search(r"<(!doctype|html|head|body|title|h1)\b", text, re.IGNORECASE):
        title = re.search(r"<title[^>]*>(.*?)</title", text, re.IGNORECASE | re.DOTALL)
        hidden = re.sub(
            r"<!--.*?-->|<(script|style)\b.*?</\1[^>]*>", " ", text, flags=re.IGNORECASE | re.DOTALL
        )
        shown = title[1] if title and title[1].strip() else hidden
        text = html.unescape(re.sub(r"<[^>]*>?", " ", shown))
    words = " ".join(text.split()).removeprefix(f"{status} ")
    return words if len(words) <= _MOST_CHARACTERS else f"{words[: _MOST_CHARACTERS - 1]}…"
