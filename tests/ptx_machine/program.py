"""PTX text as a program: instructions with resolved operands, parameters and shared variables. Knows no semantics."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

SHARED_BASE = 1024
"""Address of the first shared variable; what lies below belongs to the system."""
_REGISTER_TYPES = {".pred": torch.bool, ".b32": torch.int32, ".b64": torch.int64}
_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)\s*(.*?)\{(.*)\}\s*$", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


class PtxError(Exception):
    """The PTX text, or what it does, is not what a kernel of ours may be or do."""


@dataclass(frozen=True, slots=True)
class Reg:
    """A register by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Special:
    """A special register, such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """A number, or the address of a shared variable."""

    value: int


@dataclass(frozen=True, slots=True)
class Vec:
    """Registers in braces."""

    parts: tuple[Reg | Imm, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """Something in square brackets."""

    base: Reg | Imm
    offset: int


@dataclass(frozen=True, slots=True)
class Param:
    """A kernel parameter in square brackets."""

    number: int


@dataclass(frozen=True, slots=True)
class Label:
    """A place to branch to."""

    pc: int


Operand = Reg | Special | Imm | Vec | Address | Param | Label


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction."""

    opcode: str
    """With all its modifiers."""
    operands: tuple[Operand, ...]
    """In the order of the text."""
    guard: Reg | None
    """Predicate that it depends on."""
    negated: bool
    """It executes where the guard is false."""
    text: str
    """As written."""


@dataclass(frozen=True, slots=True)
class Program:
    """One kernel."""

    target: str
    """Arch in the header."""
    threads: int
    """Threads per CTA."""
    params: tuple[str, ...]
    """Types of the parameters, such as u64."""
    instructions: tuple[Instruction, ...]
    """The body."""
    joins: frozenset[int]
    """Instructions that have labels."""
    register_types: tuple[torch.dtype, ...]
    """By register number."""
    shared_end: int
    """Address after the last shared variable."""


def body_of(ptx: str) -> str:
    """The text without what names the arch."""
    return re.sub(r"^\.target .*$", "", ptx, flags=re.MULTILINE)


def parse(ptx: str) -> Program:
    """Parses the text of one kernel.

    Raises:
      PtxError: the text has a form that kernels of ours do not have.
    """
    ptx = re.sub(r"//[^\n]*", "", ptx)
    target = re.search(r"^\.target (\w+)\s*$", ptx, re.MULTILINE)
    entry = _ENTRY.search(ptx)
    if target is None or entry is None:
        raise PtxError("not the text of one kernel")
    name, params, directives, body = entry.groups()
    shape = re.search(r"\.reqntid (\d+), 1, 1", directives)
    if shape is None:
        raise PtxError(f"no block shape in {directives!r}")
    return _Parser(name).parse(
        body, target[1], int(shape[1]), tuple(re.findall(r"\.param \.(\w+) [^,]*?_param_\d+", params))
    )


class _Parser:
    def __init__(self, entry: str) -> None:
        self._entry = entry
        self._registers: dict[str, int] = {}
        self._types: list[torch.dtype] = []
        self._shared: dict[str, int] = {}
        self._shared_end = SHARED_BASE
        self._labels: dict[str, int] = {}
        self._statements: list[str] = []

    def parse(self, body: str, target: str, threads: int, params: tuple[str, ...]) -> Program:
        scope = 0
        for line in map(str.strip, body.splitlines()):
            if line.startswith("{"):
                scope += 1
                self._take(self._rename_locals(line.removeprefix("{").removesuffix("}"), scope))
            else:
                self._take(line)
        return Program(
            target=target,
            threads=threads,
            params=params,
            instructions=tuple(map(self._instruction, self._statements)),
            joins=frozenset(self._labels.values()),
            register_types=tuple(self._types),
            shared_end=self._shared_end,
        )

    @staticmethod
    def _rename_locals(text: str, scope: int) -> str:
        names = [name.strip() for names in re.findall(r"\.reg \.\w+ ([^;]+);", text) for name in names.split(",")]
        for name in names + re.findall(r"(\w+):(?!:)\s", text):
            text = re.sub(rf"(?<![\w.:%]){name}(?![\w.]|::)", f"%{name}{scope}", text)
        return text

    def _take(self, text: str) -> None:
        for piece in text.split(";"):
            statement = piece.strip()
            while label := re.match(r"([$%]\w+):(?!:)\s*", statement):
                self._labels[label[1]] = len(self._statements)
                statement = statement[label.end() :]
            if statement.startswith("."):
                self._declare(statement)
            elif statement:
                self._statements.append(re.sub(r"\s+", " ", statement))

    def _declare(self, statement: str) -> None:
        if match := re.fullmatch(r"\.shared \.align (\d+) \.b8\s+(\w+)\[(\d+)\]", statement):
            start = -(-self._shared_end // int(match[1])) * int(match[1])
            self._shared[match[2]], self._shared_end = start, start + int(match[3])
        elif (match := re.fullmatch(r"\.reg (\.\w+)\s+(.*)", statement)) and match[1] in _REGISTER_TYPES:
            for name in map(str.strip, match[2].split(",")):
                family = re.fullmatch(r"(%\w+)<(\d+)>", name)
                for each in [f"{family[1]}{i}" for i in range(int(family[2]))] if family else [name]:
                    self._registers[each] = len(self._types)
                    self._types.append(_REGISTER_TYPES[match[1]])
        else:
            raise PtxError(f"unknown declaration: {statement}")

    def _instruction(self, statement: str) -> Instruction:
        match = re.fullmatch(r"(?:@(!?)(%\w+) )?(\S+)(?: (.*))?", statement)
        if match is None:
            raise PtxError(f"unknown statement: {statement}")
        negated, guard, opcode, rest = match.groups()
        return Instruction(
            opcode=opcode,
            operands=tuple(map(self._operand, _OPERAND.findall(rest or ""))),
            guard=None if guard is None else Reg(self._registers[guard]),
            negated=negated == "!",
            text=statement,
        )

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return Vec(tuple(self._scalar(part.strip()) for part in text[1:-1].split(",")))
        if text.startswith("["):
            if param := re.fullmatch(rf"\[{self._entry}_param_(\d+)\]", text):
                return Param(int(param[1]))
            base, _, offset = text[1:-1].partition("+")
            return Address(self._scalar(base.strip()), int(offset or 0))
        if text in self._labels:
            return Label(self._labels[text])
        if text.startswith("%") and text not in self._registers:
            return Special(text)
        return self._scalar(text)

    def _scalar(self, text: str) -> Reg | Imm:
        if text in self._registers:
            return Reg(self._registers[text])
        if text in self._shared:
            return Imm(self._shared[text])
        if re.fullmatch(r"-?\d+", text):
            return Imm(int(text))
        if re.fullmatch(r"0f[0-9A-F]{8}", text):
            return Imm(int(text.removeprefix("0f"), 16))
        raise PtxError(f"unknown operand: {text}")
