"""Reads the program for Apple silicon as macOS would, and fails on what macOS would refuse.

    macho.py PROGRAM [LAYER]

LAYER is the native layer that must be inside, byte for byte, and is checked as a library. It knows
Mach-O through lief, and nothing of how the files were made.
"""

import re
import sys
from pathlib import Path

import lief

MINIMUM_MACOS = [14, 0, 0]
# Of a build machine: a home, a checkout, a folder for temporary files.
BUILD_PATHS = re.compile(rb"/(?:root|home|Users|tmp|work|builds|runner)/[\w./+-]{3,}")


def fail(path: str, problem: str) -> None:
    """Ends the check."""
    sys.exit(f"{path}: {problem}")


def check(path: str, kind: lief.MachO.Header.FILE_TYPE, own: tuple[str, ...]) -> bytes:
    """Checks a file of this kind, which may load `own` besides the system's libraries."""
    content = Path(path).read_bytes()
    fat = lief.MachO.parse(path)
    if fat is None or fat.size != 1:
        fail(path, "not a Mach-O file for one processor")
    binary = fat.at(0)
    if binary.header.cpu_type != lief.MachO.Header.CPU_TYPE.ARM64:
        fail(path, f"is for {binary.header.cpu_type}, expected arm64")
    if binary.header.file_type != kind:
        fail(path, f"is {binary.header.file_type}, expected {kind}")
    if list(binary.build_version.minos) != MINIMUM_MACOS:
        fail(path, f"runs from macOS {binary.build_version.minos} on, expected {MINIMUM_MACOS}")
    if binary.build_version.platform != lief.MachO.BuildVersion.PLATFORMS.MACOS:
        fail(path, f"is for {binary.build_version.platform}, expected macOS")
    # The signature covers every page before it; an Apple processor runs nothing without one.
    signature = binary.code_signature
    if signature is None or signature.data_offset + signature.data_size != len(content):
        fail(path, "has no code signature at its end")
    loaded = [library.name for library in binary.libraries]
    identity = loaded[:1] if kind == lief.MachO.Header.FILE_TYPE.DYLIB else []
    for library in loaded[len(identity) :]:
        if not library.startswith(("/usr/lib/", "/System/", *own)):
            fail(path, f"loads {library}, which is not the system's")
    if found := BUILD_PATHS.search(content):
        fail(path, f"names a path of the machine that built it: {found.group().decode()}")
    print(f"{path}: arm64, macOS {binary.build_version.minos}, signed, loads {', '.join(loaded)}")
    return content


types = lief.MachO.Header.FILE_TYPE
program = check(sys.argv[1], types.EXECUTE, ())
if len(sys.argv) > 2:
    layer = check(sys.argv[2], types.DYLIB, ("@rpath/libmlx.dylib",))
    if layer not in program:
        fail(sys.argv[1], f"does not hold {sys.argv[2]}")
    print(f"{sys.argv[1]}: holds the native layer of {len(layer)} bytes")
