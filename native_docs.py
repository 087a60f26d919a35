"""Gives the C files that mypyc generates what it leaves out: docstrings, and the names of arguments in type errors.

Compiled, help() would be empty and a wrong argument only "int object expected; got str". Both stand in tables and calls
that mypyc writes anyway, so filling them in costs nothing when the code runs. setup.py calls this between mypyc and the
C compiler; tests/unit/test_native_docs.py notices when another mypyc writes another form.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# {"name", ..., PyDoc_STR("name($self, x)\n--\n\n")}: a method or function, as mypyc writes it.
METHOD = re.compile(r'(\{"(\w+)",\s+\(PyCFunction\)\w+,\s+[A-Z_| ]+, PyDoc_STR\()("(?:[^"\\]|\\.)*"|NULL)\)')
# {"name", (getter)..., (setter)... or NULL, NULL, NULL}: the first of the last two is the docstring.
PROPERTY = re.compile(r'(\{"(\w+)",\s+\(getter\)\w+,\s+(?:\(setter\)\w+|NULL),\s+)NULL, NULL\}')
TABLE = re.compile(r"static Py(?:MethodDef|GetSetDef) (\w+?)_(?:methods|getseters)\[\] = \{.*?\n\};", re.DOTALL)
TYPE = re.compile(r"_template_ = \{.*?\n\};", re.DOTALL)
TYPE_NAME = re.compile(r'\.tp_name = "(\w+)"')
TOP_LEVEL = re.compile(r"char CPyDef_\w+_____top_level__\(void\) \{.*?\n\}", re.DOTALL)
# Wrappers call each argument obj_<name>; setters of attributes call it value.
WRONG_ARGUMENT = re.compile(r'CPy_TypeError\("([^"]+)", obj_(?!self\b)(\w+)\)')
SETTER = re.compile(
    r"^\w+___[A-Z]\w*?_set_(\w+)\(\w+ \*self, PyObject \*value, void \*closure\)\n\{.*?^\}", re.DOTALL | re.MULTILINE
)
MODULE_OF_TYPE = re.compile(r"\bkvledger(?:\.[a-z_]+)+\.(?=[A-Z])")

MARK = "/* completed by native_docs.py */\n"
SET_DOC = """static void kvledger_set_doc(void *type, const char *doc)
{
    PyObject *text = PyUnicode_FromString(doc);
    if (text == NULL || PyObject_SetAttrString((PyObject *)type, "__doc__", text) < 0)
        PyErr_Clear();
    Py_XDECREF(text);
}

"""


def complete(c_file: Path, source: Path) -> None:
    """Completes the C file of one module. ValueError when it does not look as mypyc 2.4 writes it."""
    text = c_file.read_text()
    if text.startswith(MARK):
        # mypyc found nothing to do and left the file of the last build.
        return
    tree = ast.parse(source.read_text())
    module = source.stem
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    tables = {f"{module}___{name}": docs_of(node) for name, node in classes.items()}
    tables[f"{module}module"] = docs_of(tree)
    text = TABLE.sub(lambda table: with_docs(table[0], tables.get(table[1], {})), text)
    text = TYPE.sub(lambda found: with_signature(found[0], classes), text)
    text = WRONG_ARGUMENT.sub(lambda found: f'CPy_TypeError("{found[2]}: {short(found[1])}", obj_{found[2]})', text)
    text = SETTER.sub(lambda setter: with_name(setter[0], setter[1]), text)
    c_file.write_text(MARK + with_class_docs(text, module, classes, c_file))


def docs_of(node: ast.ClassDef | ast.Module) -> dict[str, str]:
    """{name: docstring} of the functions and properties in a class or module."""
    functions = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    return {part.name: doc for part in functions if (doc := ast.get_docstring(part)) is not None}


def with_docs(table: str, docs: dict[str, str]) -> str:
    def method(found: re.Match[str]) -> str:
        # Without a signature mypyc writes NULL; a docstring alone is one without a signature then.
        start = "" if found[3] == "NULL" else found[3]
        doc = docs.get(found[2])
        return f"{found[1]}{start}{'' if doc is None and start else c_string(doc) if doc else 'NULL'})"

    def prop(found: re.Match[str]) -> str:
        doc = docs.get(found[2])
        return f"{found[1]}{'NULL' if doc is None else c_string(doc)}, NULL}}"

    return PROPERTY.sub(prop, METHOD.sub(method, table))


def with_class_docs(text: str, module: str, classes: dict[str, ast.ClassDef], c_file: Path) -> str:
    """Types that are made when the module is loaded take no docstring from their C struct: it is set then."""
    calls = "".join(class_doc_calls(module, classes))
    found = TOP_LEVEL.search(text)
    if found is None or found[0].count("return 1;") != 1:
        raise ValueError(f"{c_file}: its top level is not as mypyc 2.4 writes it, so class docstrings have no place")
    body = found[0].replace("return 1;", f"{calls}return 1;")
    return f"{text[: found.start()]}{SET_DOC if calls else ''}{body}{text[found.end() :]}"


def class_doc_calls(module: str, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    for name, node in classes.items():
        doc = ast.get_docstring(node)
        if doc is not None:
            yield f"kvledger_set_doc(CPyType_{module}___{name}, {c_string(doc)});\n    "


def with_signature(type_struct: str, classes: dict[str, ast.ClassDef]) -> str:
    """The type with a signature for inspect, where a default is a name: mypyc gives up then, inspect looks it up."""
    name = TYPE_NAME.search(type_struct)
    if "PyDoc_STR(NULL)" not in type_struct or name is None or name[1] not in classes:
        return type_struct
    for part in classes[name[1]].body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            arguments = part.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                argument.annotation = None
            del arguments.args[0]
            text = f"{name[1]}({ast.unparse(arguments)})\n--\n\n"
            return type_struct.replace("PyDoc_STR(NULL)", f"PyDoc_STR({c_string(text)})")
    return type_struct


def with_name(setter: str, attribute: str) -> str:
    return re.sub(
        r'CPy_TypeError\("([^"]+)", value\)',
        lambda found: f'CPy_TypeError("{attribute}: {short(found[1])}", value)',
        setter,
    )


def short(type_name: str) -> str:
    """kvledger.core.groups.spec.KVCacheConfig -> KVCacheConfig"""
    return MODULE_OF_TYPE.sub("", type_name)


def c_string(text: str) -> str:
    return f'"{"".join([c_character(byte) for byte in text.encode()])}"'


def c_character(byte: int) -> str:
    """As it is, or in octal, which takes three digits whatever follows."""
    return chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\?' else f"\\{byte:03o}"
