"""PTX text as data: one kernel, its parameters, registers, shared variables and instructions.

Directives, statements and operands outside the grammar below raise `UnknownPtx`. Blocks in braces
(as inline assembly opens them) get names of their own for what they declare.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.ptx.errors import UnknownPtx

# What may stand between instructions and means nothing to a run.
_IGNORED = {".loc", ".file", ".pragma", ".section", ".maxntid", ".reqntid", ".minnctapersm"}
_TOKEN = re.compile(
    r"""\s+|//[^\n]*|/\*.*?\*/|(?P<string>"[^"]*")
    |(?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|[0-9]+U?)
    |(?P<word>[.%$A-Za-z_](?:[\w.$]|::(?=\w))*)
    |(?P<mark>[{}\[\](),;:@!|<>+=-])""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Register:
    """A register by its name, made unique over blocks."""

    name: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register, such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A literal: an int, or the bits of a float as ``0f3F800000`` has them, with their width."""

    value: int
    float_bits: int = 0  # 0: an integer; else 32 or 64


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, or a label."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``."""

    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, ...}``."""

    parts: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``d|p``: a result and the predicate beside it."""

    first: Operand
    second: Operand


Operand = Register | Special | Immediate | Symbol | Address | Vector | Pair


@dataclass(frozen=True, slots=True)
class Instruction:
    """One statement: ``@guard opcode.modifiers operands``."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    negated: bool
    text: str


@dataclass(slots=True)
class Program:
    """A kernel as parsed; ``registers`` maps a name to its type without the dot."""

    name: str = ""
    version: str = ""
    target: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)  # alignment, bytes
    max_threads: int | None = None
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def tokens_of(text: str) -> Iterator[str]:
    """Words, numbers and marks, comments left out."""
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            line = text.count("\n", 0, at) + 1
            raise UnknownPtx(f"line {line}: what is {text[at : at + 20]!r}?")
        at = found.end()
        if found.lastgroup is not None:
            yield found.group()


class Parser:
    """Reads one module with exactly one kernel and no functions."""

    def __init__(self, text: str) -> None:
        self.tokens = list(tokens_of(text))
        self.at = 0
        self.program = Program()
        self.scopes: list[dict[str, str]] = [{}]
        self.blocks = 0

    def parse(self) -> Program:
        """The program; UnknownPtx on anything that isn't understood."""
        while self.at < len(self.tokens):
            self.module_item()
        if not self.program.name:
            raise UnknownPtx("the module has no .entry")
        return self.program

    # -- tokens ------------------------------------------------------------------------------------

    def peek(self) -> str:
        if self.at >= len(self.tokens):
            raise UnknownPtx("the module ends in the middle of a statement")
        return self.tokens[self.at]

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if expected is not None and token != expected:
            around = " ".join(self.tokens[max(0, self.at - 5) : self.at + 5])
            raise UnknownPtx(f"expected {expected!r}, got {token!r} in: {around}")
        self.at += 1
        return token

    def until(self, end: str) -> list[str]:
        """Tokens up to a mark, which is taken too."""
        start = self.at
        while self.peek() != end:
            self.at += 1
        self.at += 1
        return self.tokens[start : self.at - 1]

    # -- module ------------------------------------------------------------------------------------

    def module_item(self) -> None:
        word = self.take()
        if word == ".version":
            self.program.version = self.take()
            if self.peek().startswith("."):
                self.program.version += self.take()
        elif word == ".target":
            self.program.target = self.take()
            while self.peek() == ",":
                self.take()
                self.take()
        elif word == ".address_size":
            if self.take() != "64":
                raise UnknownPtx("only .address_size 64 is known")
        elif word in (".visible", ".weak"):
            pass
        elif word == ".entry":
            self.entry()
        elif word == ".shared":
            self.shared_variable()
        elif word == ".common":
            # Numba's environment pointer: declared by every kernel, read by none.
            self.until(";")
        else:
            raise UnknownPtx(f"directive {word!r} is not known at the level of the module")

    def shared_variable(self) -> None:
        words = self.until(";")
        found = re.fullmatch(
            r"(?:\.align (\d+) )?\.([bus]\d+|f\d+) ([\w$]+)(?: \[ (\d+) \])?", " ".join(words)
        )
        if found is None:
            raise UnknownPtx(f"shared variable: {' '.join(words)}")
        size = int(found[2][1:]) // 8
        self.program.shared[found[3]] = (int(found[1] or size), size * int(found[4] or 1))

    def entry(self) -> None:
        if self.program.name:
            raise UnknownPtx("the module has more than one .entry")
        self.program.name = self.take()
        if self.peek() == "(":
            self.take()
            for words in self.commas(")"):
                if len(words) != 3 or words[0] != ".param":
                    raise UnknownPtx(f"parameter: {' '.join(words)}")
                self.program.parameters[words[2]] = words[1].removeprefix(".")
        while self.peek() != "{":
            directive = self.take()
            if directive not in _IGNORED:
                raise UnknownPtx(f"directive {directive!r} of an entry is not known")
            numbers = []
            while self.peek().isdigit() or self.peek() == ",":
                numbers.append(self.take())
            if directive in (".maxntid", ".reqntid"):
                limit = 1
                for number in numbers:
                    limit *= 1 if number == "," else int(number)
                self.program.max_threads = limit
        self.block()

    def commas(self, end: str) -> list[list[str]]:
        words = self.until(end)
        lists: list[list[str]] = [[]]
        for word in words:
            if word == ",":
                lists.append([])
            else:
                lists[-1].append(word)
        return lists if lists != [[]] else []

    # -- statements --------------------------------------------------------------------------------

    def block(self) -> None:
        """``{ statements }``, with a scope for what is declared inside."""
        self.take("{")
        self.blocks += 1
        suffix = "" if len(self.scopes) == 1 else f"#{self.blocks}"
        self.scopes.append({"": suffix})
        while self.peek() != "}":
            self.statement()
        self.take("}")
        self.scopes.pop()

    def statement(self) -> None:
        word = self.peek()
        if word == "{":
            self.block()
        elif word == ";":
            self.take()
        elif word == ".reg":
            self.take()
            self.registers()
        elif word == ".shared":
            self.take()
            self.shared_variable()
        elif word in _IGNORED:
            self.until(";") if word == ".pragma" else self.location()
        elif self.tokens[self.at + 1] == ":":
            self.program.labels[self.take()] = len(self.program.code)
            self.take(":")
        else:
            self.instruction()

    def location(self) -> None:
        """``.loc file line column`` has no end mark: three numbers."""
        if self.take() != ".loc":
            raise UnknownPtx("directive inside a kernel is not known")
        for _ in range(3):
            self.take()

    def registers(self) -> None:
        kind = self.take().removeprefix(".")
        for words in self.commas(";"):
            names = [words[0]]
            if len(words) == 4 and words[1] == "<" and words[3] == ">":
                names = [f"{words[0]}{i}" for i in range(int(words[2]))]
            elif len(words) != 1:
                raise UnknownPtx(f"registers: {' '.join(words)}")
            for name in names:
                unique = name + self.scopes[-1][""]
                self.scopes[-1][name] = unique
                self.program.registers[unique] = kind

    def instruction(self) -> None:
        start = self.at
        guard, negated = None, False
        if self.peek() == "@":
            self.take()
            if self.peek() == "!":
                self.take()
                negated = True
            name = self.resolve(self.take())
            if not isinstance(name, Register):
                raise UnknownPtx(f"guard {name!r} is not a register")
            guard = name
        opcode, *modifiers = self.take().split(".")
        operands: list[Operand] = []
        while self.peek() != ";":
            operands.append(self.operand())
            if self.peek() != ";":
                self.take(",")
        text = " ".join(self.tokens[start : self.at])
        self.take(";")
        self.program.code.append(
            Instruction(opcode, tuple(modifiers), tuple(operands), guard, negated, text)
        )

    # -- operands ----------------------------------------------------------------------------------

    def operand(self) -> Operand:
        token = self.peek()
        if token == "{":
            self.take()
            parts = [self.simple()]
            while self.peek() == ",":
                self.take()
                parts.append(self.simple())
            self.take("}")
            return Vector(tuple(parts))
        if token == "[":
            self.take()
            base = self.simple()
            if not isinstance(base, (Register, Symbol, Immediate)):
                raise UnknownPtx(f"an address starts with {base!r}")
            offset = 0
            if self.peek() in "+-":
                sign = -1 if self.take() == "-" else 1
                if self.peek() == "-":
                    self.take()
                    sign = -sign
                offset = sign * int(self.take().rstrip("U"), 0)
            self.take("]")
            return Address(base, offset)
        first = self.simple()
        if self.peek() == "|":
            self.take()
            return Pair(first, self.simple())
        return first

    def simple(self) -> Operand:
        token = self.take()
        if token == "-":
            found = self.simple()
            if not isinstance(found, Immediate) or found.float_bits:
                raise UnknownPtx(f"minus before {found!r}")
            return Immediate(-found.value)
        if token[0].isdigit():
            if token[:2].lower() in ("0f", "0d"):
                return Immediate(int(token[2:], 16), 32 if token[1] in "fF" else 64)
            return Immediate(int(token.rstrip("U"), 0))
        return self.resolve(token)

    def resolve(self, name: str) -> Operand:
        for scope in reversed(self.scopes):
            if name in scope:
                return Register(scope[name])
        if name.startswith("%"):
            return Special(name)
        return Symbol(name)


def parse(text: str) -> Program:
    """Parse PTX text with one kernel."""
    return Parser(text).parse()
