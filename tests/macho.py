"""Reads the program for Apple silicon as macOS would, and fails on what macOS would refuse.

    macho.py PROGRAM [LAYER]

LAYER is the native layer that must be inside, byte for byte, and is checked as a library. It knows
Mach-O through lief, and nothing of how the files were made.
"""

import hashlib
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


def check_signature(path: str, content: bytes, at: int) -> None:
    """Compares the signature's hash of every page; an Apple processor runs no other page.

    The layout is that of xnu's cs_blobs.h: a superblob with an index, in it a code directory.
    """
    word = lambda where: int.from_bytes(content[where : where + 4], "big")
    index = [(word(at + 12 + 8 * n), at + word(at + 16 + 8 * n)) for n in range(word(at + 8))]
    directories = [where for kind, where in index if kind == 0]
    if word(at) != 0xFADE0CC0 or len(directories) != 1:
        fail(path, "its code signature cannot be read")
    directory = directories[0]
    flags, hashes, pages, limit = (word(directory + it) for it in (12, 16, 28, 32))
    size, kind, page = content[directory + 36], content[directory + 37], 1 << content[directory + 39]
    if word(directory) != 0xFADE0C02 or (size, kind) != (32, 2) or not flags & 2:
        fail(path, "is not signed ad hoc with SHA-256")
    if limit != at or pages != -(-limit // page):
        fail(path, f"its signature covers {limit} bytes, expected {at}")
    for n in range(pages):
        found = hashlib.sha256(content[n * page : min((n + 1) * page, limit)]).digest()
        where = directory + hashes + n * size
        if content[where : where + size] != found:
            fail(path, f"page {n} is not the one that was signed")


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
    signature = binary.code_signature
    if signature is None:
        fail(path, "has no code signature")
    check_signature(path, content, signature.data_offset)
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
