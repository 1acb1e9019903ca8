// Builds the page into one compressed file and the content security policy that names its hashes.
// The same sources and versions give the same bytes.
//
//   node build.mjs [FOLDER]
import { createHash } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import esbuild from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const folder = process.argv[2] ?? join(here, "../src");
// The second script has these from the first.
const SHARED = /^(preact|preact\/hooks|preact\/jsx-runtime|\.\/memo|\.\/parts)$/;
const shared = { name: "shared", setup(build) {
    build.onResolve({ filter: SHARED }, ({ path }) => ({ path, namespace: "shared" }));
    build.onLoad({ filter: /.*/, namespace: "shared" }, ({ path }) => ({ contents: `module.exports = globalThis.shardpack[${JSON.stringify(path)}]` }));
} };
const bundle = async (entry, plugins = []) => {
    const built = await esbuild.build({
        entryPoints: [join(here, "src", entry)], bundle: true, minify: true, plugins, write: false,
        target: "es2022", charset: "utf8", format: "iife", jsx: "automatic", jsxImportSource: "preact",
        legalComments: "inline", define: { "process.env.NODE_ENV": '"production"' },
    });
    return built.outputFiles[0].text.trim();
};
const script = `requestAnimationFrame(() => setTimeout(() => {${await bundle("main.tsx")}}));`.replaceAll("</script", "<\\/script");
const answers = (await bundle("answers.ts", [shared])).replaceAll("</script", "<\\/script");
// The first paint does not wait for the script.
const style = await bundle("style.css");
const licences = [["preact"], ["markdown-it"], ["linkify-it"], ["mdurl"], ["uc.micro", "LICENSE.txt"], ["punycode.js", "LICENSE-MIT.txt"], ["entities"], ["highlight.js"], ["katex"], ["dompurify"]]
    .map(([name, file = "LICENSE"]) => `${name}\n\n${readFileSync(join(here, "node_modules", name, file), "utf8").trim()}\n`).join("\n").replaceAll("\r", "").replaceAll("--", "- -");
const hash = (text) => "'sha256-" + createHash("sha256").update(text).digest("base64") + "'";
const page = `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="description" content="Chat with the model that this shardpack server serves"><title>shardpack</title>
<link rel="icon" href="data:,"><style>${style}</style></head><body><div id="app"><h1 class="boot">shardpack</h1></div><script type="text/plain" id="answers">${answers}</script><script>${script}</script></body></html>
<!--
${licences}-->
`;
const policy = ["default-src 'none'", `script-src ${hash(script)} ${hash(answers)}`, `style-src ${hash(style)}`, "connect-src 'self'",
    "img-src data: blob:", "font-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"].join("; ");
const packed = gzipSync(page, { level: 9 });
packed[9] = 255; // The operating system's byte would tell where it was built.
writeFileSync(join(folder, "page.html.gz"), packed);
writeFileSync(join(folder, "page.policy"), policy);
console.log(`page: ${page.length} bytes, ${packed.length} compressed`);
