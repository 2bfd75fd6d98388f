"""Exact reading of numbers as people and models write: 6{,}400, \\frac{1}{2}, 75\\%, 2.5e5, 18\\text{ cm}.

A number becomes a Fraction, so 1/500! and 3^{-70} are compared without rounding. What is not plain arithmetic
on rational numbers (roots, symbols, sets) is not read here.
"""

import math
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 1000  # of an answer
MAX_BITS = 60_000  # of a power or factorial; 9^{9^9} must cost nothing
MAX_BITS_IN_ALL = 500_000  # of all results on the way to a number; 5000!*5000!*5000!*... must cost little
MAX_NESTED = 50  # brackets and exponents in an answer

SCALES = {"%": Fraction(1, 100), "percent": Fraction(1, 100), "dozen": Fraction(12), "hundred": Fraction(100)}
SCALES |= {"thousand": Fraction(10**3), "million": Fraction(10**6), "billion": Fraction(10**9)}
SCALES |= {"trillion": Fraction(10**12)}

_CHARACTERS = {
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\N{MULTIPLICATION SIGN}": "\\times ",
    "\N{MIDDLE DOT}": "\\cdot ",
    "\N{DOT OPERATOR}": "\\cdot ",
    "\N{DIVISION SIGN}": "/",
    "\N{FRACTION SLASH}": "/",
    "\N{PLUS-MINUS SIGN}": "\\pm ",
    "\N{GREEK SMALL LETTER PI}": "\\pi ",
    "\N{INFINITY}": "\\infty ",
    "\N{LESS-THAN OR EQUAL TO}": "\\le ",
    "\N{GREATER-THAN OR EQUAL TO}": "\\ge ",
    "\N{UNION}": "\\cup ",
    "\N{ALMOST EQUAL TO}": "\\approx ",
    "\N{DEGREE SIGN}": "^\\circ ",
    "\N{VULGAR FRACTION ONE HALF}": "\\frac{1}{2}",
    "\N{VULGAR FRACTION ONE THIRD}": "\\frac{1}{3}",
    "\N{VULGAR FRACTION TWO THIRDS}": "\\frac{2}{3}",
    "\N{VULGAR FRACTION ONE QUARTER}": "\\frac{1}{4}",
    "\N{VULGAR FRACTION THREE QUARTERS}": "\\frac{3}{4}",
    "\N{IDEOGRAPHIC FULL STOP}": ". ",
    "\N{IDEOGRAPHIC COMMA}": ", ",
    "\N{IDEOGRAPHIC SPACE}": " ",
    "\N{NO-BREAK SPACE}": " ",
    "\N{NARROW NO-BREAK SPACE}": " ",
    "\N{THIN SPACE}": " ",
}
_CHARACTERS |= dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff", "")  # of no width
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_ROOT = re.compile(r"√\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\w))")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


def plain(text: str) -> str:
    """Digits of any script, full-width letters, typographic signs, roots, powers: as ASCII and LaTeX."""
    if text.isascii():
        return text
    # A space of these kinds between digits groups thousands: 1 234 567.
    text = re.sub(r"(?<=\d)[\u00a0\u202f\u2009](?=\d{3}(?!\d))", "", text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2] or m[3]}}}", text)
    return _NOT_ASCII.sub(lambda m: _ascii(m.group()), text)


def _ascii(character: str) -> str:
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    if 0xFF01 <= ord(character) <= 0xFF5E:  # full-width forms of ASCII
        return chr(ord(character) - 0xFEE0)
    return str(unicodedata.decimal(character)) if character.isdecimal() else character


@dataclass(frozen=True, slots=True)
class Number:
    """A number, the scale after it and its unit: 75% has face 75, scale 1/100; 3 hrs has unit "h".

    face None: too large to work out. unit "": none, or not a unit of measurement that is known.
    """

    face: Fraction | None
    scale: Fraction = Fraction(1)
    unit: str = ""

    def equals(self, other: "Number") -> bool:
        """Exact equality. Against a bare number 75% equals 75 and 0.75, 5 million 5 and 5000000.

        Two known units must be the same; they are not converted.
        """
        if self.face is None or other.face is None or (self.unit != other.unit and self.unit and other.unit):
            return False
        if (self.scale == 1) != (other.scale == 1):
            scaled, bare = (self, other) if other.scale == 1 else (other, self)
            assert scaled.face is not None
            return bare.face in (scaled.face, scaled.face * scaled.scale)
        return self.face * self.scale == other.face * other.scale


def read_number(text: str) -> Number | None:
    """The number that the whole text is, without its unit; None if it is not one. Text as from _tidy."""
    if len(text) > MAX_CHARACTERS or not any(c.isdigit() for c in text):
        return None
    based = re.fullmatch(r"(-?[0-9A-Fa-f]+)_\{?(\d{1,2})\}?", text)
    if based:
        return _in_base(based[1], int(based[2]))
    body, scale, unit = _split_unit(text)
    mixed = re.fullmatch(r"([-+]?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)", body)  # 1 1/2
    if mixed:
        body = "{}({}+{}/{})".format(*mixed.groups())
    try:
        return Number(_Arithmetic(body).whole(), scale, unit)
    except _TooLarge:
        return Number(None)
    except (_NotANumber, ZeroDivisionError):
        return None


def _in_base(digits: str, base: int) -> Number | None:
    """1011_2 is 11."""
    try:
        return Number(Fraction(int(digits, base)))
    except ValueError:  # no such base, or a digit that it does not have
        return None


_SHORT = "cm|mm|km|kg|mg|ml|mL|ft|in|oz|lb|lbs|yd|mi|hr|hrs|min|sec|mph|pm|am|Hz|kW"
_WORD = (  # only a known abbreviation may touch the number: 3xy is a product
    rf"(?:(?<![A-Za-z])(?:{_SHORT})(?![A-Za-z])|(?<=[ /])(?:[A-Za-z]{{3,}}|[mgshlL](?![A-Za-z])))"
    r"\.?(?:\^\{?-?\d\}?)?"
)
_UNIT = re.compile(
    r"(?<=[\d)}!])\s*(?P<percent>%)?"
    r"(?P<unit>(?:\s*(?:\\(?:text|mathrm|textbf|mbox)\{[^{}]*\}(?:\^\{?-?\d\}?)?"
    r"|\^\{?\\circ\}?(?:\s*[CF](?![A-Za-z]))?))*"
    rf"(?:\s*{_WORD}(?:[ /-]+{_WORD}){{0,3}})?)\s*$"
)
_NOT_UNITS = re.compile(r"\b(?:sqrt|pi|sin|cos|tan|log|ln|exp|mod|and|or|to|times|plus|minus|over|base)\b")


_UNIT_NAMES = """
mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre
in inch inches, ft foot feet, yd yard, mi mile, mg milligram, g gram, kg kilogram, lb pound, oz ounce
ml mL milliliter millilitre, l L liter litre, s sec second, min minute, h hr hour, day, week, month, year
degree circ, radian rad, dollar, cent, am, pm, mph, kw kW, hz Hz
"""
_UNITS = {
    name: line.split()[0] for line in re.split("[,\n]", _UNIT_NAMES) for name in line.split()
}  # every name of a unit -> its first
_POWERS = {"square": "^2", "squared": "^2", "sq": "^2", "cubic": "^3", "cubed": "^3"}
_UNIT_PART = re.compile(r"[A-Za-z]+|/|\^\{?(-?\d)\}?")


def _split_unit(text: str) -> tuple[str, Fraction, str]:
    """The arithmetic, the scale behind it, and the unit: 5\\text{ million dollars} -> 5, 10**6, dollar."""
    match = _UNIT.search(text)
    if match is None or _NOT_UNITS.search(match["unit"]):
        return text, Fraction(1), ""
    parts = list(_UNIT_PART.finditer(re.sub(r"\\(?:text|mathrm|textbf|mbox)", "", match["unit"])))
    scale = SCALES["%"] if match["percent"] else Fraction(1)
    if parts and parts[0][0].lower() in SCALES:
        scale = SCALES[parts.pop(0)[0].lower()]
    return text[: match.start()].strip(), scale, _unit_name(parts)


def _unit_name(parts: list[re.Match[str]]) -> str:
    """ "square centimetres" and "cm^2" are "cm^2", "km per hour" is "km/h"; "" if there is a word of another kind."""
    names, power = "", ""
    for part in parts:
        word = part[0]
        if word in _POWERS:
            power = _POWERS[word]
        elif part[1]:
            names += f"^{part[1]}"
        elif word in ("/", "per"):
            names += "/"
        else:
            name = _UNITS.get(word) or _UNITS.get(word.lower().removesuffix("s"))
            if name is None:
                return ""
            names, power = names + name + power, ""
    return names + power


class _NotANumber(Exception):
    pass


class _TooLarge(Exception):
    pass


_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)"
    r"(?:(?<=[\d.])\\overline\{(?P<period>\d+)\})?"
    r"|(?P<operator>\\frac|\\times|\\cdot|\\div|[-+*/^!(){}]))"
)


class _Arithmetic:
    """Recursive descent over + - * / ^ ! brackets and \\frac on exact rationals."""

    def __init__(self, text: str):
        self.text, self.at, self.nested, self.brackets = text, 0, 0, False
        self.bits = 0  # of the results so far

    def whole(self) -> Fraction:
        value = self.sum()
        if self.text[self.at :].strip():
            raise _NotANumber
        return value

    def peek(self) -> re.Match[str] | None:
        return _TOKEN.match(self.text, self.at)

    def take(self, *operators: str) -> str | None:
        match = self.peek()
        if match and match["operator"] in operators:
            self.at = match.end()
            return match["operator"]
        return None

    def need(self, operator: str) -> None:
        if not self.take(operator):
            raise _NotANumber

    def paid(self, value: Fraction) -> Fraction:
        """A result, whose size is what it costs; the time of an operation grows faster than that."""
        self.bits += value.numerator.bit_length() + value.denominator.bit_length()
        if self.bits > MAX_BITS_IN_ALL:
            raise _TooLarge
        return value

    def sum(self) -> Fraction:
        value = self.product()
        while sign := self.take("+", "-"):
            term = self.product()
            value = self.paid(value + term if sign == "+" else value - term)
        return value

    def product(self) -> Fraction:
        value = self.signed()
        while operator := self.take("*", "/", "\\times", "\\cdot", "\\div"):
            factor = self.signed()
            value = self.paid(value / factor if operator in ("/", "\\div") else value * factor)
        return value

    def signed(self) -> Fraction:
        negative = False
        while sign := self.take("+", "-"):
            negative ^= sign == "-"
        value = self.power()
        return -value if negative else value

    def power(self) -> Fraction:
        value = self.atom()
        while operator := self.take("^", "!"):
            value = self.paid(_factorial(value) if operator == "!" else _power(value, self.exponent()))
        return value

    def exponent(self) -> Fraction:
        self.deeper()
        sign = self.take("-")
        value = self.atom()
        while self.take("^"):  # 2^3^2 is 2^9
            value = self.paid(_power(value, self.exponent()))
        return -value if sign else value

    def atom(self) -> Fraction:
        if self.take("\\frac"):
            top = self.argument()
            return self.paid(top / self.argument())
        for opening, closing in ("(", ")"), ("{", "}"):
            if self.take(opening):
                return self.bracketed(closing)
        return self.number()

    def bracketed(self, closing: str, thousands: bool = False) -> Fraction:
        """The sum up to `closing`. Without `thousands`, 1,234 in it is a pair."""
        self.deeper()
        outside, self.brackets = self.brackets, not thousands
        value = self.sum()
        self.need(closing)
        self.brackets = outside
        return value

    def deeper(self) -> None:
        self.nested += 1
        if self.nested > MAX_NESTED:  # also keeps the recursion flat
            raise _NotANumber

    def number(self) -> Fraction:
        match = self.peek()
        if match is None or match["number"] is None:
            raise _NotANumber
        if "," in match["number"] and self.brackets:  # (1,234) is a pair
            raise _NotANumber
        self.at = match.end()
        value = self.paid(_decimal(match["number"].replace(",", ""), match["period"]))
        if match["number"].isdigit() and self.text.startswith("\\frac", self.at):  # 1\frac{1}{2}
            value += self.atom()
        return value

    def argument(self) -> Fraction:
        if self.take("{"):
            return self.bracketed("}", thousands=True)
        digit = re.compile(r"\s*(\d)").match(self.text, self.at)
        if digit is None:
            raise _NotANumber
        self.at = digit.end()
        return Fraction(int(digit[1]))


def _decimal(text: str, period: str | None) -> Fraction:
    """period: the digits that repeat for ever behind the others, 6 in 0.1\\overline{6}."""
    mantissa, _, exponent = text.lower().partition("e")
    if len(exponent) > 6:
        raise _TooLarge
    value = Fraction(mantissa.rstrip("."))
    if period:
        if "." not in mantissa or exponent:
            raise _NotANumber
        places = len(mantissa.partition(".")[2])
        value += Fraction(int(period), (10 ** len(period) - 1) * 10**places)
    return value * _power(Fraction(10), Fraction(int(exponent or 0)))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        raise _NotANumber  # a root, or undefined
    power = exponent.numerator
    if abs(base) <= 1 and base.denominator == 1:  # 0, 1, -1: a huge exponent costs nothing
        return base if power % 2 else abs(base)
    if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(power) > MAX_BITS:
        raise _TooLarge
    return base**power


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise _NotANumber
    if value > 5000:
        raise _TooLarge
    return Fraction(math.factorial(int(value)))
