"""kvledger: the KV cache manager of a paged LLM engine, as a library."""

__version__ = "0.1.0"


def build_info() -> str:
    """One line: the version and whether the compiled or the pure build is loaded."""
    from kvledger import errors

    build = "pure Python" if (errors.__file__ or "").endswith(".py") else "compiled"
    return f"kvledger {__version__} ({build})"
