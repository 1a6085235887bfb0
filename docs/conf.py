"""How Sphinx makes the site: `make docs`, without network, into site/.

Sphinx with furo rather than mkdocs: the reference is checked by name (`nitpicky`: a docstring or a signature that refers to
what does not exist is an error), and pages are Markdown all the same (myst-parser).
"""

import inspect
import re
from typing import Any

import tatami

project = "Tatami"
author = "The Tatami developers"
release = tatami.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["conf.py"]
nitpicky = True
default_role = "literal"  # docstrings write `name` as Markdown does
smartquotes = False

autodoc_default_options = {"members": True, "undoc-members": True, "show-inheritance": True, "member-order": "groupwise"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_inherit_docstrings = False

# What may be referred to without being found here: what other projects define (their inventories are on the network), type
# variables, and classes that are not public, which signatures name by the module that defines them. A public class is found
# there, too.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|numpy|np|mpi4py|MPI|ray|matplotlib|rich|typing|collections|pathlib|datetime)(\..*)?"),
    ("py:.*", r"(enum|abc|dataclasses|subprocess)\..*|Path|Axes|Figure|RichTable|optional|a delegate|.*\[.*"),
    ("py:.*", r"tatami\.\w+\.\w+\..*|tatami\.\w+\._\w+|AbstractOptimizer|ModelFn|LossFn|PhaseHook|Moment"),
]

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]

html_theme = "furo"
html_title = f"Tatami {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_logo = html_favicon = "static/logo.svg"
html_theme_options = {
    f"{theme}_css_variables": {f"color-brand-{name}": colour for name in ("primary", "content", "visited")}
    for theme, colour in (("light", "#2f6b4c"), ("dark", "#8fc79f"))
}
html_copy_source = False
html_show_sphinx = False


_FOR_TESTS = re.compile(r" +([a-z_]+(?:, [a-z_]+)*): .*\bfor tests\b")


def _hide_what_is_for_tests(_app: Any, thing: Any, _is_bound: bool) -> None:
    """Arguments that a docstring calls "for tests" (clocks and the like) are in the source only."""
    holder = inspect.getdoc(thing) or ""
    if getattr(thing, "__name__", "") == "__init__":
        holder = inspect.getdoc(inspect.getmodule(thing).__dict__.get(thing.__qualname__.split(".")[0])) or ""
    hidden = {name for line in holder.splitlines() if (found := _FOR_TESTS.match(line)) for name in found[1].split(", ")}
    if hidden and inspect.isfunction(thing):
        signature = inspect.signature(thing)
        kept = [each for name, each in signature.parameters.items() if name not in hidden]
        thing.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]


_as_written: dict[str, list[str]] = {}
_SECTIONS = ("Args:", "Returns:", "Raises:", "Yields:", "Attributes:", "Source:")


def _prepare(_app: Any, _what: str, name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    """An indented block after an empty line is code, as in Markdown, unless a section of the docstring holds it."""
    in_section = in_code = False
    written: list[str] = []
    for line in lines:
        if _FOR_TESTS.match(line):
            continue
        indented = line.startswith("    ")
        if line and not indented:
            in_section, in_code = line in _SECTIONS, False
        elif indented and not in_section and not in_code and written and not written[-1]:
            written += [".. code-block:: text" if any(c in line for c in "├└│┌") else "::", ""]
            in_code = True
        written.append(line)
    lines[:] = written
    _as_written[name] = list(written)


def _no_type_before_a_colon(_app: Any, what: str, name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    """Napoleon reads "The units: all of them" of a property as a type and its description; ours are sentences."""
    if what in ("attribute", "property", "data"):
        lines[:] = _as_written[name]


def _links_of_the_readme(_app: Any, _path: Any, _parent: str, content: list[str]) -> None:
    """The README's links start at the top of the repository; the page that includes it stands in docs/."""
    text = content[0]
    for name, page in (("CHANGELOG.md", "changelog.md"), ("CONTRIBUTING.md", "contributing.md"), ("examples/", "../examples/")):
        text = text.replace(f"]({name}", f"]({page}")
    content[0] = text


def setup(app: Any) -> None:
    app.connect("autodoc-before-process-signature", _hide_what_is_for_tests)
    app.connect("autodoc-process-docstring", _prepare, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", _no_type_before_a_colon, priority=600)
    app.connect("include-read", _links_of_the_readme)
