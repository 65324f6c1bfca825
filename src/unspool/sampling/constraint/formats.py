"""What each `format` of a string looks like, as an expression for the whole string.

Each accepts a subset of its specification that every validator takes: leap years are exact, leap seconds and lower-case
`t`/`z` are left out, host names have no `--` (reserved for encoded names).
"""

from __future__ import annotations

_YEAR = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_BY_FOUR = r"(?:0[48]|[2468][048]|[13579][26])"  # 04, 08, 12, … 96
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)-02-29)"
)
_HOUR = r"(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_N = "[0-9]{1,9}"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_CLOCK = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
# Labels of at most 29 characters, at most eight: a host name's limits of 63 and 253 without counting.
_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9]){0,14}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,7}}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"
_HEX = "[0-9A-Fa-f]"


def _ipv6() -> str:
    forms = [f"{_H16}(?::{_H16}){{7}}"]
    for before in range(8):  # groups before `::`, which stands for at least one
        left = "" if before == 0 else _H16 if before == 1 else f"{_H16}(?::{_H16}){{{before - 1}}}"
        room = 7 - before
        right = "" if room == 0 else f"(?:{_H16}(?::{_H16}){{0,{room - 1}}})?"
        forms.append(f"{left}::{right}")
    return f"(?:{'|'.join(forms)})"


_PCHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_PORT = "(?::[0-9]{1,5})?"
_QUERY = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(?://(?:{_HOST}|{_IPV4}){_PORT}(?:/{_PCHAR}*)*|{_PCHAR}+(?:/{_PCHAR}*)*)"
    rf"{_QUERY}"
)
_WITHOUT_COLON = r"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"  # a relative path's first part
_RELATIVE = rf"(?:/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|{_WITHOUT_COLON}+(?:/{_PCHAR}*)*)?{_QUERY}"
_STEP = "/(?:[^~/]|~0|~1)*"
_VARIABLES = r"\{[+#./;?&]?[A-Za-z0-9_]{1,30}(?:,[A-Za-z0-9_]{1,30}){0,9}\}"
# Expressions that all dialects read alike, with groups one deep.
_ITEM = (
    r"(?:[A-Za-z0-9 _,:;=@%!~#&'<>/-]|\\[dwsDWS.\\+*?(){}|^$\[\]/-]|\[\^?(?:a-z|A-Z|0-9|[A-Za-z0-9_ .,:;@%+*?])+\]|\.)"
)
_TIMES = r"(?:[*+?]|\{[0-9]{1,2},?\})?"
_GROUP = rf"\((?:\?:)?(?:{_ITEM}{_TIMES})+(?:\|(?:{_ITEM}{_TIMES})+)*\)"

STRINGS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|{_N}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": _URI,
    "uri-reference": f"(?:{_URI}|{_RELATIVE})",
    "uri-template": rf"(?:[A-Za-z0-9._~!$&()*+,;=:@/?-]|%[0-9A-Fa-f]{{2}}|{_VARIABLES})*",
    "json-pointer": f"(?:{_STEP})*",
    "relative-json-pointer": f"(?:0|[1-9]{{1,3}})(?:#|(?:{_STEP})+)",
    "regex": rf"\^?(?:(?:{_ITEM}|{_GROUP}){_TIMES})*\$?",
    "byte": r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
}
# Those that allow more; what the others allow is a part of it.
STRINGS |= {
    "iri": STRINGS["uri"],
    "iri-reference": STRINGS["uri-reference"],
    "idn-email": STRINGS["email"],
    "idn-hostname": STRINGS["hostname"],
}
# OpenAPI's names for how wide an integer is.
INTEGERS = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}
