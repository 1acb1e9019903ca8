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
/** Takes modules from what an earlier script has left in `shardpack`. */
const taken = (filter, key = (path) => path) => ({ name: "taken", setup(build) {
    build.onResolve({ filter }, ({ path }) => ({ path: key(path), namespace: "taken" }));
    build.onLoad({ filter: /.*/, namespace: "taken" }, ({ path }) => ({ contents: `module.exports = globalThis.shardpack[${JSON.stringify(path)}]` }));
} });
// Scripts that the first paint does not wait for, in the order in which they are set up (`lazy.tsx`): none is to take longer than a frame.
// So KaTeX is built from its sources, with its tables apart: its published file is one script. Languages are many small programs.
const KATEX = join(here, "node_modules/katex"), TABLES = ["symbols", "fontMetricsData", "svgGeometry"];
const tables = TABLES.map((name) => `import * as ${name} from ${JSON.stringify(join(KATEX, "src", name))}; globalThis.shardpack["katex/${name}"] = { __esModule: true, ...${name} };`).join("");
/** What a module exports, computed here. */
const exportsOf = async (path) => {
    const built = await esbuild.build({ entryPoints: [path], bundle: true, format: "esm", write: false });
    return import("data:text/javascript;base64," + Buffer.from(built.outputFiles[0].contents).toString("base64"));
};
// A table that KaTeX's own build computes too: browsers take long to.
const unicode = `globalThis.shardpack["katex/unicodeSymbols"] = { __esModule: true, default: ${JSON.stringify((await exportsOf(join(KATEX, "src/unicodeSymbols.js"))).default)} };`;
const LANGUAGES = [["bash", "c", "cpp", "csharp", "css", "diff"], ["go", "ini", "java", "javascript", "json", "kotlin"], ["markdown", "python", "ruby", "rust", "sql"], ["swift", "typescript", "xml", "yaml"]];
const languages = LANGUAGES.map((names) => names.map((name) => `import ${name} from "highlight.js/lib/languages/${name}"; globalThis.shardpack["highlight.js/lib/core"].registerLanguage("${name}", ${name});`).join(""));
const plugins = {
    "later/katex.ts": [{ name: "katex", setup: (build) => build.onResolve({ filter: /^katex$/ }, () => ({ path: join(KATEX, "katex.ts") })) }, taken(new RegExp(`/(${[...TABLES, "unicodeSymbols"].join("|")})$`), (path) => "katex/" + path.split("/").at(-1))],
    "answers.ts": [taken(/^(preact|preact\/hooks|preact\/jsx-runtime|\.\/memo|\.\/parts|markdown-it|dompurify|katex|highlight\.js\/lib\/core)$/)],
};
const bundle = async (entry, text) => {
    const built = await esbuild.build({
        ...(text ? { stdin: { contents: text, resolveDir: here } } : { entryPoints: [join(here, "src", entry)] }), bundle: true, minify: true, plugins: plugins[entry], write: false,
        target: "es2022", charset: "utf8", format: "iife", jsx: "automatic", jsxImportSource: "preact",
        legalComments: "inline", define: { "process.env.NODE_ENV": '"production"', __VERSION__: JSON.stringify(JSON.parse(readFileSync(join(KATEX, "package.json"), "utf8")).version) },
    });
    return built.outputFiles[0].text.trim().replaceAll("</script", "<\\/script");
};
const early = await bundle("early.ts"), main = await bundle("main.tsx"), later = [];
for (const name of ["markdown-it", "dompurify"]) later.push(await bundle(`later/${name}.ts`));
later.push(await bundle("tables", tables + unicode));
for (const name of ["katex", "highlight"]) later.push(await bundle(`later/${name}.ts`));
for (const text of languages) later.push(await bundle("languages", text));
later.push(await bundle("answers.ts"));
const asText = (text) => `<script type="text/plain">${text}</script>`;
const style = await bundle("style.css");
const licences = [["preact"], ["markdown-it"], ["linkify-it"], ["mdurl"], ["uc.micro", "LICENSE.txt"], ["punycode.js", "LICENSE-MIT.txt"], ["entities"], ["highlight.js"], ["katex"], ["dompurify"]]
    .map(([name, file = "LICENSE"]) => `${name}\n\n${readFileSync(join(here, "node_modules", name, file), "utf8").trim()}\n`).join("\n").replaceAll("\r", "").replaceAll("--", "- -");
const { t } = await exportsOf(join(here, "src/strings.ts"));
// What an empty chat looks like, as `main.tsx` and `chat.tsx` draw it: there before any script.
const first = `<div class="page" inert><header class="top"><button type="button" class="model-name"><b>${t.product}</b></button></header><div class="chats"></div><main class="chat"><div class="log"><div class="empty"><h1>${t.empty}</h1><p>${t.emptyHint}</p></div></div><div class="composer"><div class="box"><textarea rows="1" aria-label="${t.message}" placeholder="${t.placeholder}"></textarea><div class="row"><button type="button" class="main round" aria-label="${t.send}"></button></div></div></div></main></div>`;
const hash = (text) => "'sha256-" + createHash("sha256").update(text).digest("base64") + "'";
const page = `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="description" content="Chat with the model that this shardpack server serves"><title>shardpack</title>
<link rel="icon" href="data:,"><style>${style}</style></head><body><div id="app">${first}</div>${asText(main)}<script>${early}</script>${later.map(asText).join("")}</body></html>
<!--
${licences}-->
`;
const policy = ["default-src 'none'", `script-src ${[early, main, ...later].map(hash).join(" ")}`, `style-src ${hash(style)}`, "connect-src 'self'",
    "img-src data: blob:", "font-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"].join("; ");
const packed = gzipSync(page, { level: 9 });
packed[9] = 255; // The operating system's byte would tell where it was built.
writeFileSync(join(folder, "page.html.gz"), packed);
writeFileSync(join(folder, "page.policy"), policy);
console.log(`page: ${page.length} bytes, ${packed.length} compressed`);
