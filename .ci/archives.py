"""Check what the built archives contain: all of the package, its licence and its mark of types; nothing else."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

LARGEST = 8 * 2**20  # bytes of an archive; a larger one has something in it that nobody meant


def main(folder: Path) -> None:
    """Compare the wheel with the files of the package that git knows, and look for what should not be there."""
    (wheel,) = folder.glob("*.whl")
    (source,) = folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        inside = {x for x in archive.namelist() if not x.endswith("/")}
    tracked = subprocess.run(["git", "ls-files", "src/kernelformer"], capture_output=True, text=True, check=True).stdout
    package = {x.removeprefix("src/") for x in tracked.split()}
    missing, metadata = package - inside, {x.partition("/")[2] for x in inside - package}
    if missing:
        sys.exit(f"{wheel.name} lacks {sorted(missing)}")
    if unknown := {x for x in inside - package if ".dist-info/" not in x}:
        sys.exit(f"{wheel.name} has {sorted(unknown)}, which git does not know")
    if "kernelformer/py.typed" not in inside or "licenses/LICENSE" not in metadata:
        sys.exit(f"{wheel.name} lacks py.typed or the licence")
    with tarfile.open(source) as archive:
        names = {x.partition("/")[2] for x in archive.getnames()}
    for needed in (
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "constraints.txt",
        "Makefile",
        "tests/test_imports.py",
    ):
        if needed not in names:
            sys.exit(f"{source.name} lacks {needed}")
    for archive in (wheel, source):
        if archive.stat().st_size > LARGEST:
            sys.exit(f"{archive.name} has {archive.stat().st_size} bytes, more than {LARGEST}")
    print(f"{wheel.name}: {len(inside)} files, {source.name}: {len(names)} files")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
