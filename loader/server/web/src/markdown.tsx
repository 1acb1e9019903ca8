// Markdown that grows: finished blocks are rendered once, only the last one again.
import { memo } from "./memo";
import { useMemo, useRef } from "preact/hooks";
import MarkdownIt from "markdown-it";
import DOMPurify from "dompurify";
import katex from "katex";
import hljs from "highlight.js/lib/core";
import { Copy } from "./parts";

const COLOURED_MAX = 50_000, PLAIN_FROM = 20_000, CHUNK_LINES = 100, CHUNK_CHARS = 2000;
/** A word that browsers take long to break. */
const LONG_WORD = /\S{2000}/;
const coloured = (text: string, language: string) =>
    text.length < COLOURED_MAX && hljs.getLanguage(language) ? hljs.highlight(text, { language, ignoreIllegals: true }).value : "";
const md: any = new (MarkdownIt as any)({ html: false, linkify: false, highlight: coloured });
md.validateLink = (link: string) => /^(https?:|mailto:|#)/i.test(link.trim());
md.renderer.rules.image = (tokens: any[], index: number) => md.utils.escapeHtml(tokens[index].content);
md.renderer.rules.table_open = () => '<div class="table"><table>';
md.renderer.rules.table_close = () => "</table></div>";
// The page's policy allows no styles within elements.
md.core.ruler.push("alignment", ({ tokens }: any) => {
    for (const token of tokens) {
        const side = /^text-align:(\w+)$/.exec(token.attrGet?.("style") ?? "")?.[1];
        if (side) { token.attrs = token.attrs.filter(([name]: string[]) => name !== "style"); token.attrJoin("class", "to-" + side); }
    }
});

function formula(state: any, silent: boolean) {
    const rest: string = state.src.slice(state.pos, state.pos + 4000);
    const found = /^\$\$([^]+?)\$\$|^\\\[([^]+?)\\\]|^\\\(([^]+?)\\\)|^\$(?![\s$])([^$\n]*?[^\s$\\])\$(?!\d)/.exec(rest);
    if (!found) return false;
    if (!silent) {
        const token = state.push("formula", "math", 0);
        token.content = found[1] ?? found[2] ?? found[3] ?? found[4];
        token.meta = found[1] !== undefined || found[2] !== undefined;
    }
    state.pos += found[0].length;
    return true;
}
md.inline.ruler.before("escape", "formula", formula);
md.renderer.rules.formula = (tokens: any[], index: number) => {
    const { content, meta } = tokens[index];
    try {
        return katex.renderToString(content, { displayMode: meta, output: "mathml", throwOnError: true, maxExpand: 200, maxSize: 20, trust: false })
            .replace(/<annotation[^]*?<\/annotation>/g, "");
    } catch { return `<code>${md.utils.escapeHtml(content)}</code>`; }
};
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
    if (node.tagName === "A") { node.setAttribute("target", "_blank"); node.setAttribute("rel", "noopener noreferrer"); }
});
const clean = (html: string) => DOMPurify.sanitize(html, { USE_PROFILES: { html: true, mathMl: true }, FORBID_ATTR: ["style", "id", "name"], FORBID_TAGS: ["style", "form", "input", "img", "svg"] });

/** Renders what an answer may have, in steps that fit between two frames. */
export const rehearsals = [() => { clean("<p>a</p>"); }, ...["a", "# b\n\n**c** `d`", "1. e\n2. f\n\n> g [h](https://i)", "| j |\n|---|\n| k |\n", "```rust\nlet l = 1;\n```\n", "$m$"].flatMap((text) => {
    let html = "";
    return [() => { html = md.render(text); }, () => { clean(html); }];
})];

type Block = { kind: "text" | "code"; text: string; language: string; open: boolean; /** Where in the source the next one begins. */ end: number };
/** Blocks of a text: fences at the margin, and what blank lines divide. */
export function blocks(source: string): Block[] {
    const found: Block[] = [];
    let lines: string[] = [], fence = "", language = "", blank = false, at = 0, next = 0;
    const end = (kind: Block["kind"], until: number, open = false) => {
        if (kind === "code" || lines.some((line) => line.trim())) found.push({ kind, text: lines.join("\n"), language, open, end: until });
        lines = []; language = "";
    };
    for (const line of source.split("\n")) {
        at = next; next += line.length + 1;
        if (fence) {
            if (line.startsWith(fence) && !line.slice(fence.length).trim().replaceAll(fence[0], "")) { fence = ""; end("code", next); } else lines.push(line);
            continue;
        }
        const begun = /^(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/.exec(line);
        if (begun) { end("text", at); [, fence, language] = begun; blank = false; continue; }
        if (blank && line && !/^(\s|[-*+] |\d+[.)] |\|)/.test(line)) end("text", at);
        if (line.trim() || blank || lines.length) lines.push(line);
        blank = line.trim() === "";
    }
    end(fence ? "code" : "text", source.length, true);
    return found;
}
const Line = memo(({ text }: { text: string }) => <span class="chunk">{text}</span>);
function chunks(text: string, byLines: boolean) {
    const parts: string[] = [];
    if (byLines) { const lines = text.split("\n"); for (let at = 0; at < lines.length; at += CHUNK_LINES) parts.push(lines.slice(at, at + CHUNK_LINES).join("\n")); }
    const split = byLines ? parts : [text];
    return split.flatMap((part) => part.length <= CHUNK_CHARS ? [part] : Array.from({ length: Math.ceil(part.length / CHUNK_CHARS) }, (_, at) => part.slice(at * CHUNK_CHARS, (at + 1) * CHUNK_CHARS)));
}
const Code = memo(({ text, language, open }: { text: string; language: string; open: boolean }) => {
    const html = useMemo(() => open ? "" : coloured(text, language), [text, language, open]);
    return <div class="code"><div class="bar"><span>{language || "text"}</span><Copy text={() => text} /></div>
        <pre tabIndex={0} aria-label={language || "code"}>{html ? <code dangerouslySetInnerHTML={{ __html: clean(html) }} /> : <code>{chunks(text, true).map((part, at) => <Line key={at} text={part} />)}</code>}</pre></div>;
});
const Text = memo(({ text, open }: { text: string; open: boolean }) => {
    // What is still growing is rendered no oftener than its rendering allows.
    const last = useRef({ text: "", html: "", at: 0, cost: 0 });
    if (text.length > PLAIN_FROM || (text.length > CHUNK_CHARS && LONG_WORD.test(text))) return <div class="plain">{chunks(text, false).map((part, at) => <Line key={at} text={part} />)}</div>;
    const now = performance.now(), it = last.current;
    if (it.text !== text && (!open || now - it.at > it.cost * 6)) {
        const html = clean(md.render(text));
        last.current = { text, html, at: now, cost: performance.now() - now };
    }
    return <div class="md" dangerouslySetInnerHTML={{ __html: last.current.html }} />;
});
const GROUP = 24;
type Grown = { text: string; groups: Block[][] };
/** The blocks of a text in groups. One that grows is read from where its last group begins: the groups before it are as they were. */
function grouped(known: Grown, source: string): Block[][] {
    if (!source.startsWith(known.text)) { known.text = ""; known.groups = []; }
    const begin = known.text.length;
    let rest = blocks(source.slice(begin)), end = 0;
    // What is last may still grow.
    for (; rest.length > GROUP; rest = rest.slice(GROUP)) { known.groups.push(rest.slice(0, GROUP)); end = rest[GROUP - 1].end; }
    known.text = source.slice(0, begin + end);
    return [...known.groups, rest];
}
const Group = memo(({ blocks, live }: { blocks: Block[]; live: boolean }) => <div class="group">{blocks.map((block, at) => {
    const open = live && at === blocks.length - 1;
    return block.kind === "code" ? <Code key={at} text={block.text} language={block.language} open={open && block.open} /> : <Text key={at} text={block.text} open={open} />;
})}</div>);
export const Markdown = memo(({ source, live }: { source: string; live: boolean }) => {
    const known = useRef<Grown>({ text: "", groups: [] });
    return <>{grouped(known.current, source).map((it, at, all) => <Group key={at} blocks={it} live={live && at === all.length - 1} />)}</>;
});
