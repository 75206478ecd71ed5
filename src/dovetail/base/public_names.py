"""The public names of a package, which its `__init__` resolves when they are first used. Editors read its imports below
`if TYPE_CHECKING`; the same imports, `from dovetail.api.show import show as show`, tell the module of each name.
"""

from __future__ import annotations

import ast
import functools
import pkgutil


@functools.cache
def public_modules(package: str) -> dict[str, str]:
    """Return the module of each public name."""
    nodes = ast.walk(ast.parse(pkgutil.get_data(package, "__init__.py") or b""))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{package}.")]
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname}
