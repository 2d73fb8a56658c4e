"""The chart libraries of report.html, from npm: fetched again as `SOURCES.json` says, or at other versions.

    python tools/vendor.py                       # the same files again
    python tools/vendor.py d3@7.9.2 @observablehq/plot@0.6.17

Needs npm and a network. It writes the minified files, the licences of all that is in them, and where they come from with their
checksums, which `tests/test_report_page.py` compares.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).parent.parent / "headprune" / "app" / "report" / "page" / "vendor"
SOURCES = VENDOR / "SOURCES.json"
FILES = {"d3": "dist/d3.min.js", "@observablehq/plot": "dist/plot.umd.min.js"}
NOT_IN_THE_FILES = {"commander", "iconv-lite", "rw", "safer-buffer"}  # of d3-dsv's programs for the command line


def main() -> None:
    wanted = sys.argv[1:] or [f"{s['package']}@{s['version']}" for s in json.loads(SOURCES.read_text())]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "init", "-y"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--save-exact"]
        subprocess.run([*install, *wanted], cwd=folder, check=True)
        modules = Path(folder) / "node_modules"
        lock = json.loads((Path(folder) / "package-lock.json").read_text())["packages"]
        found = [taken(modules, lock, package) for package in FILES]
        (VENDOR / "LICENSES.txt").write_text(licences(modules), encoding="utf-8")
    SOURCES.write_text(json.dumps(found, indent=1) + "\n")


def taken(modules: Path, lock: dict[str, Any], package: str) -> dict[str, str]:
    """Copy a package's minified file; where it comes from."""
    content = (modules / package / FILES[package]).read_bytes()
    if b"</script" in content.lower() or b"<!--" in content:
        raise SystemExit(
            f"{FILES[package]} cannot stand in a page as it is: it holds the end of a script, or a comment."
        )
    name = Path(FILES[package]).name
    (VENDOR / name).write_bytes(content)
    about = lock[f"node_modules/{package}"]
    return {
        "file": name, "package": package, "version": about["version"], "member": FILES[package], "licence": about["license"],
        "sha256": hashlib.sha256(content).hexdigest(), "package_integrity": about["integrity"],
    }  # fmt: skip


def licences(modules: Path) -> str:
    """The licences of the packages that are bundled in the files, each text once."""
    texts: dict[str, list[str]] = {}
    for path in sorted([*modules.glob("*/package.json"), *modules.glob("@*/*/package.json")]):
        about = json.loads(path.read_text())
        if about["name"] in NOT_IN_THE_FILES:
            continue
        (licence,) = [p for p in path.parent.iterdir() if p.name.lower().startswith(("licen", "copying", "unlicense"))]
        text = licence.read_text(encoding="utf-8").strip()
        notice, _, rest = text.partition("\n") if text.startswith("Copyright") else ("", "", text)
        texts.setdefault(rest.strip(), []).append(f"{about['name']} {about['version']}: {notice or about['license']}")
    return "\n\n".join("\n".join([*names, "", text]) for text, names in texts.items()) + "\n"


if __name__ == "__main__":
    main()
