"""Check what the built archives contain: all of the package, its licence and its mark of types; nothing else."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

LARGEST = 8 * 2**20  # bytes of an archive; a larger one has something in it that nobody meant


def main(folder: Path) -> None:
    """Compare the archives of both distributions with the files that git tracks."""
    needed = ("CHANGELOG.md", "CITATION.cff", "constraints.txt", "Makefile", "tests/test_imports.py")
    check(folder, "kernelformer", "src", needed)
    check(folder, "kernelformer_lab", "lab/src", ("pyproject.toml",))


def check(folder: Path, name: str, source: str, needed: tuple[str, ...]) -> None:
    """Check one distribution: its wheel has the tracked files of its package and no others."""
    (wheel,) = folder.glob(f"{name}-[0-9]*.whl")
    (archived,) = folder.glob(f"{name}-[0-9]*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        inside = {x for x in archive.namelist() if not x.endswith("/")}
    tracked = subprocess.run(["git", "ls-files", f"{source}/{name}"], capture_output=True, text=True, check=True).stdout
    package = {x.removeprefix(f"{source}/") for x in tracked.split()}
    missing, metadata = package - inside, {x.partition("/")[2] for x in inside - package}
    if missing:
        sys.exit(f"{wheel.name} lacks {sorted(missing)}")
    if unknown := {x for x in inside - package if ".dist-info/" not in x}:
        sys.exit(f"{wheel.name} has {sorted(unknown)}, which git does not know")
    if f"{name}/py.typed" not in inside or "licenses/LICENSE" not in metadata:
        sys.exit(f"{wheel.name} lacks py.typed or the licence")
    with tarfile.open(archived) as archive:
        names = {x.partition("/")[2] for x in archive.getnames()}
    for file in ("LICENSE", "README.md", *needed):
        if file not in names:
            sys.exit(f"{archived.name} lacks {file}")
    for path in (wheel, archived):
        if path.stat().st_size > LARGEST:
            sys.exit(f"{path.name} has {path.stat().st_size} bytes, more than {LARGEST}")
    print(f"{wheel.name}: {len(inside)} files, {archived.name}: {len(names)} files")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
