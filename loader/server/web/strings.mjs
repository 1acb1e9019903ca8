// Finds texts that people read outside of strings.ts: children of elements, and attributes that are
// shown or read aloud.
import { readdirSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import esbuild from "esbuild";

const folder = join(dirname(fileURLToPath(import.meta.url)), "src");
const TEXT = String.raw`"((?:[^"\\]|\\.)*)"`;
// What esbuild makes of elements: one child stands behind `children:`, several on lines of their own.
const SHOWN = [new RegExp(String.raw`\b(?:children|title|placeholder|alt|label):\s*` + TEXT, "g"), new RegExp(String.raw`"aria-label":\s*` + TEXT, "g"), new RegExp(String.raw`(?<!jsxs?\(\n\s*)(?<=^\s*)` + TEXT + ",?$", "gm")];
/** Units and signs are the same in every language. */
const UNITS = /\b(ms|tok\/s|bit|iB|W)\b|°C|µs/g;
const found = readdirSync(folder).filter((name) => name.endsWith(".tsx")).flatMap((name) => {
    const { code } = esbuild.transformSync(readFileSync(join(folder, name), "utf8"), { loader: "tsx", jsx: "automatic", charset: "utf8" });
    return SHOWN.flatMap((shown) => [...code.matchAll(shown)]).map(([, text]) => text).filter((text) => /\p{L}{2}/u.test(text.replace(UNITS, "")))
        .map((text) => `${name}: "${text}"`);
});
// A check that finds nothing anywhere would find nothing here either.
const planted = esbuild.transformSync('const a = <p title="Read me">Some words<b>{x}</b></p>; const b = <i aria-label="Aloud">alone</i>;', { loader: "tsx", jsx: "automatic" }).code;
const seen = SHOWN.flatMap((shown) => [...planted.matchAll(shown)]).map(([, text]) => text).sort().join();
if (seen !== "Aloud,Read me,Some words,alone") throw new Error(`the check of strings is blind: ${seen}\n${planted}`);
if (found.length) {
    console.error(`texts belong into strings.ts, so that they can be read and translated in one place:\n${found.join("\n")}`);
    process.exit(1);
}
