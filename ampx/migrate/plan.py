"""Edits that were decided on, and their application to the tree in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import libcst as cst

from .report import Finding, Kind, NeedsHumanError
from .source import Source, only_statement

# Gets the node with all edits inside it made, and gives what stands in its place.
Edit: TypeAlias = Callable[[Any], Any]

# Stands for a statement that was removed. An empty line of statements would be dropped with its comments.
GONE: Final = cst.Pass()
_WIDTH: Final = 100


class Plan:
    """What a dialect wants done to one file.

    Attributes:
        source: The file.
        findings: What to tell.
        claimed: References that an edit takes care of.
        imports: Modules that the new code needs beside ampx, with a comment for the line.
    """

    def __init__(self, source: Source) -> None:
        """Start with nothing to do."""
        self.source = source
        self.findings: list[Finding] = []
        self.claimed: set[cst.CSTNode] = set()
        self.imports: dict[str, str] = {}
        self._edits: dict[cst.CSTNode, Edit] = {}
        self._before: dict[cst.CSTNode, list[str]] = {}
        self._after: dict[cst.CSTNode, list[str]] = {}

    @property
    def changes(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._edits or self._before or self._after)

    @property
    def first_line(self) -> int:
        """The line of the first edit."""
        return min(self.source.line(node) for node in (*self._edits, *self._before, *self._after))

    def tell(self, node: cst.CSTNode, kind: Kind, what: str, advice: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(self.source.line(node), kind, what, advice))

    def block(self, node: cst.CSTNode, what: str, advice: str) -> NeedsHumanError:
        """Give the error that leaves the whole file to a human."""
        return NeedsHumanError(self.source.line(node), what, advice)

    def claim(self, *nodes: cst.CSTNode) -> None:
        """Note that references are taken care of."""
        self.claimed.update(nodes)

    def edit(self, node: cst.CSTNode, edit: Edit) -> None:
        """Put something in the place of a node."""
        if node in self._edits:
            raise self.block(
                node, f"`{self.source.code(node).strip()}` would be rewritten twice", "Rewrite it by hand."
            )
        self._edits[node] = edit

    def expression(self, node: cst.BaseExpression, text: str) -> None:
        """Put an expression, written out, in the place of another."""
        self.edit(node, lambda updated: keep_parentheses(updated, self.parse_expression(text)))

    def statement(self, node: cst.CSTNode, text: Callable[[Any], str]) -> None:
        """Put statements in the place of a line, keeping the comments on it.

        Args:
            node: The line's only small statement, or something in it.
            text: Gives the statements from the line's small statement, with the edits inside it made.
        """
        line = only_statement(self.source, node)
        if line is None:
            code = self.source.code(node).strip().rstrip(";")
            raise self.block(node, f"`{code}` shares its line", "Give it a line of its own.")
        self.edit(line, lambda updated: self._exchange(updated, text(updated.body[0])))

    def remove(self, node: cst.CSTNode) -> None:
        """Take a line away; its comments stay."""
        line = only_statement(self.source, node)
        if line is None:
            self.edit(node, lambda updated: cst.Pass())
            return
        self.edit(line, self._removed)

    def insert_before(self, statement: cst.CSTNode, text: str) -> None:
        """Put statements before one; the comments above it stay above them."""
        self._before.setdefault(statement, []).append(text)

    def insert_after(self, statement: cst.CSTNode, text: str) -> None:
        """Put statements after one."""
        self._after.setdefault(statement, []).append(text)

    def apply(self) -> cst.Module:
        """Give the tree with every edit made."""
        return self.source.module.visit(_Applier(self))

    def written(self, node: cst.CSTNode, name: str, options: Sequence[str]) -> str:
        """Write a call that starts where a node does: on one line if that is short, else an argument a line."""
        call = f"{name}({', '.join(options)})"
        if self.source.column(node) + len(call) <= _WIDTH:
            return call
        lines = "".join(f"    {option},\n" for option in options)
        return f"{name}(\n{lines})"

    def parse_statements(self, text: str) -> Sequence[Any]:
        """Parse statements written with four spaces and line feeds into those of the file."""
        module = self.source.module
        return cst.parse_module(self._in_style(f"{text}\n"), config=module.config_for_parsing).body

    def parse_expression(self, text: str) -> cst.BaseExpression:
        """Parse an expression, written like statements."""
        return cst.parse_expression(self._in_style(text), config=self.source.module.config_for_parsing)

    def _in_style(self, text: str) -> str:
        """Give text with the indentation and line ends of the file."""
        module = self.source.module
        lines = []
        for line in text.split("\n"):
            body = line.lstrip(" ")
            lines.append(module.default_indent * ((len(line) - len(body)) // 4) + body)
        return module.default_newline.join(lines)

    def code(self, node: cst.CSTNode) -> str:
        """Give the text of a node, of the old tree or of the new."""
        return self.source.module.code_for_node(node)

    def _exchange(self, line: cst.SimpleStatementLine, text: str) -> Any:
        made = list(self.parse_statements(text))
        made[0] = made[0].with_changes(leading_lines=line.leading_lines)
        comment = line.trailing_whitespace
        if comment.comment is not None:
            if isinstance(made[-1], cst.SimpleStatementLine):
                made[-1] = made[-1].with_changes(trailing_whitespace=comment)
            else:
                made[-1] = made[-1].with_changes(body=made[-1].body.with_changes(header=comment))
        return cst.FlattenSentinel(made)

    def _removed(self, line: cst.SimpleStatementLine) -> Any:
        return line.with_changes(body=[GONE])  # the block around it takes it out and moves its comments on

    def around(self, original: cst.CSTNode, made: Any) -> Any:
        """Add to an edited node what was inserted before and after it."""
        before, after = self._before.get(original, []), self._after.get(original, [])
        if not before and not after:
            return made
        body = list(made.nodes) if isinstance(made, cst.FlattenSentinel) else []
        if not body and not isinstance(made, cst.RemovalSentinel):
            body = [made]
        first: list[Any] = [one for text in before for one in self.parse_statements(text)]
        if first and body:
            first[0] = first[0].with_changes(leading_lines=body[0].leading_lines)
            body[0] = body[0].with_changes(leading_lines=[])
        last = [one for text in after for one in self.parse_statements(text)]
        return cst.FlattenSentinel([*first, *body, *last])

    def keep_comments(self, original: cst.SimpleStatementLine, made: Any) -> Any:
        """Put comments that stood inside a rewritten statement, and would be lost, above it."""
        comments = [one.value for small in original.body for one in self.source.under(small, cst.Comment)]
        nodes = list(made.nodes) if isinstance(made, cst.FlattenSentinel) else [made]
        if not comments or isinstance(made, cst.RemovalSentinel):
            return made
        text = "".join(map(self.code, nodes))
        lost = [cst.EmptyLine(comment=cst.Comment(one)) for one in comments if one not in text]
        nodes[0] = nodes[0].with_changes(leading_lines=[*nodes[0].leading_lines, *lost])
        return cst.FlattenSentinel(nodes)

    def edited(self, original: cst.CSTNode, updated: Any) -> Any:
        """Make the edit of one node."""
        edit = self._edits.get(original)
        return updated if edit is None else edit(updated)


class _Applier(cst.CSTTransformer):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        made = super().on_leave(original_node, updated_node)
        if isinstance(made, (cst.IndentedBlock, cst.Module)):
            made = without_empty_lines(made)
        made = self._plan.edited(original_node, made)
        if isinstance(original_node, cst.SimpleStatementLine):
            made = self._plan.keep_comments(original_node, made)
        return self._plan.around(original_node, made)


def without_empty_lines(block: Any) -> Any:
    """Take out lines whose statement was removed; their comments go to what follows."""
    if not any(_is_gone(line) for line in block.body):
        return block
    body: list[Any] = []
    waiting: list[cst.EmptyLine] = []
    for line in block.body:
        if _is_gone(line):
            waiting.extend(one for one in line.leading_lines if one.comment is not None)
            if line.trailing_whitespace.comment is not None:
                waiting.append(cst.EmptyLine(comment=line.trailing_whitespace.comment))
            continue
        body.append(line.with_changes(leading_lines=[*waiting, *line.leading_lines]) if waiting else line)
        waiting = []
    if not body:
        body.append(cst.SimpleStatementLine(body=[cst.Pass()], leading_lines=waiting))
        waiting = []
    return block.with_changes(body=body, footer=[*waiting, *block.footer])


def _is_gone(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 and line.body[0] is GONE


def keep_parentheses(old: Any, new: cst.BaseExpression) -> cst.BaseExpression:
    """Give the new expression the parentheses and comments around the old one, where it has some."""
    if getattr(old, "lpar", ()) and not getattr(new, "lpar", ()):
        return new.with_changes(lpar=old.lpar, rpar=old.rpar)
    return new
