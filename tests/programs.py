"""Python programs that stand as text in tests and on pages, where no linter sees that a name has gone."""

import ast
import importlib


def missing_imports(program: str, name: str = "<program>") -> list[str]:
    """Return what a program imports of the package although it is not there. `name`: of the program, in its errors."""
    missing = []
    for node in ast.walk(ast.parse(program, name)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "toolkit":
                    importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "toolkit":
            names = [alias.name for alias in node.names]
            module = __import__(str(node.module), fromlist=names)  # also imports those that are modules
            missing += [f"{node.module}.{attribute}" for attribute in names if not hasattr(module, attribute)]
    return missing
