"""Checks the C layer for macOS against a build of MLX.

    mlx_layer.py LAYER.dylib LIBMLX.dylib
"""

import re
import sys

import lief

lief.logging.disable()

SYSTEM = "/usr/lib/libSystem.B.dylib"
CXX = "/usr/lib/libc++.1.dylib"


def imports(library):
    """Names that a library takes from others, and which library each is to come from."""
    found = {}
    for symbol in library.imported_symbols:
        binding = symbol.binding_info if symbol.has_binding_info else None
        place = binding.library.name if binding is not None and binding.has_library else None
        found[symbol.name] = place
    return found


def main():
    layer_path, mlx_path = sys.argv[1:]
    layer, mlx = (lief.MachO.parse(path).at(0) for path in (layer_path, mlx_path))
    commands = list(layer.commands)
    [identity] = [c.name for c in commands if c.command == lief.MachO.LoadCommand.TYPE.ID_DYLIB]
    assert identity == "@rpath/libshardpack_mlx.dylib", identity
    paths = [c.path for c in commands if isinstance(c, lief.MachO.RPathCommand)]
    assert paths == ["@loader_path"], paths
    [oldest] = [c.minos for c in commands if isinstance(c, lief.MachO.BuildVersion)]
    assert list(oldest) == [14, 0, 0], oldest
    assert layer.has_code_signature and layer.code_signature.data_size > 0, "not signed"
    # A signature without a certificate: the blob's magic, and no CMS blob in its index.
    blob = bytes(layer.code_signature.content)
    assert blob[:4] == b"\xfa\xde\x0c\xc0" and b"\xfa\xde\x0c\x02" in blob, "no signature in it"
    needed = [c.name for c in layer.libraries if c.name != identity]
    assert sorted(needed) == sorted(["@rpath/libmlx.dylib", CXX, SYSTEM]), needed

    with open("loader/mlx/src/table.rs", encoding="utf-8") as file:
        table = set(re.findall(r"^    (sp_\w+): unsafe", file.read(), re.MULTILINE))
    exported = {symbol.name for symbol in layer.exported_symbols}
    missing = [name for name in sorted(table) if f"_{name}" not in exported]
    assert len(table) > 50 and not missing, f"not in the layer: {missing}"

    has = {symbol.name for symbol in mlx.exported_symbols}
    takes = imports(mlx)
    asked = [name for name, place in imports(layer).items() if place == "@rpath/libmlx.dylib"]
    missing = [name for name in asked if name not in has]
    assert len(asked) > 50 and not missing, f"not in {mlx_path}: {missing}"
    # One C++ library: what MLX throws is caught here only if both take it from the system.
    for name in ("___cxa_throw", "___cxa_begin_catch", "___gxx_personality_v0", "__ZTISt9exception"):
        assert imports(layer).get(name) == CXX == takes.get(name), f"{name} is not the system's"
    print(
        f"{mlx_path}: {len(table)} functions looked up, {len(asked)} names of MLX asked for, "
        "all there; macOS 14.0, signed ad hoc"
    )


main()
