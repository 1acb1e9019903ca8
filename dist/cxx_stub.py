"""Writes a linker's stub of macOS's C++ library: the names that a dynamic library takes from it.

    cxx_stub.py LIBRARY STUB.tbd
"""

import sys

import lief

lief.logging.disable()

CXX = "/usr/lib/libc++.1.dylib"

# In the library since macOS 15 alone; the layer has its own, since it is compiled for macOS 14.
TOO_NEW = "bad_function_call"

# Further names that the layer may need. Only what has been in macOS's library for long: a name that
# the oldest macOS lacks keeps the layer from being loaded there.
ALSO = [
    "__ZNSt3__19to_stringEi",
    "__ZNSt3__19to_stringEm",
    "__ZNSt11logic_errorC1EPKc",
    "__ZNKSt9exception4whatEv",
    "__ZNSt9exceptionD2Ev",
    "__ZTISt9exception",
]


def names(library):
    """What `library` imports from the C++ library; names that are looked up everywhere as well."""
    for symbol in library.imported_symbols:
        binding = symbol.binding_info if symbol.has_binding_info else None
        place = binding.library.name if binding is not None and binding.has_library else None
        if place in (None, CXX) and symbol.name.startswith(("__Z", "___cxa", "___gxx")):
            yield symbol.name


def main():
    library, stub = sys.argv[1:]
    found = sorted({*names(lief.MachO.parse(library).at(0)), *ALSO})
    found = [name for name in found if TOO_NEW not in name]
    assert "___cxa_throw" in found, f"{library} takes no ___cxa_throw from {CXX}"
    listed = ", ".join(f"'{name}'" for name in found)
    with open(stub, "w", encoding="ascii") as file:
        file.write(
            "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\n"
            f"install-name: '{CXX}'\nexports:\n"
            f"  - targets: [ arm64-macos ]\n    symbols: [ {listed} ]\n...\n"
        )


main()
