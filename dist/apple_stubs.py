"""Writes linker's stubs of Apple's libraries: zig's of the system's own, and of frameworks the names
that the program takes from each, as apple_stubs.txt lists them. A name that is missing there ends
the link; it belongs into the list if the oldest macOS has it.

    apple_stubs.py FOLDER
"""

import pathlib
import shutil
import sys

import ziglang

LIST = pathlib.Path(__file__).with_suffix(".txt")


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    # One library holds them all.
    system = pathlib.Path(ziglang.__file__).parent / "lib/libc/darwin/libSystem.tbd"
    for name in ["System", "c", "m", "iconv"]:
        shutil.copyfile(system, folder / f"lib{name}.tbd")
    libraries = {}
    for line in LIST.read_text(encoding="ascii").splitlines():
        if line.startswith("/"):
            names = libraries.setdefault(line, [])
        elif line and not line.startswith("#"):
            names.append(line)
    for library, names in libraries.items():
        place = pathlib.PurePath(library)
        if ".framework/" in library:
            stub = folder / f"{place.name}.framework" / f"{place.name}.tbd"
        else:
            stub = folder / f"{place.name.split('.')[0]}.tbd"
        stub.parent.mkdir(parents=True, exist_ok=True)
        listed = ", ".join(f"'{name}'" for name in names)
        symbols = f"    symbols: [ {listed} ]\n" if names else ""
        stub.write_text(
            "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\n"
            f"install-name: '{library}'\nexports:\n"
            f"  - targets: [ arm64-macos ]\n{symbols}...\n",
            encoding="ascii",
        )


main()
