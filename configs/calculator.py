"""The tool of configs/calculator.yaml."""

import ast
import operator

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
MOST_CHARACTERS = 200


def calculate(expression: str) -> str:
    """Works out an arithmetic expression.

    Args:
        expression: numbers with + - * / // % and brackets, for example (3 + 4) * 12
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"an expression has at most {MOST_CHARACTERS} characters")
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.expr) -> int | float:
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.operand))
    raise ValueError("only numbers with + - * / // % and brackets can be worked out")
