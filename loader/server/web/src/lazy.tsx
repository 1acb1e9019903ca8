// Markdown, its formulas and colours are a script of their own in the page, which is neither read nor set
// up before the first answer is shown: the first paint does not pay for it.
import * as preact from "preact";
import * as hooks from "preact/hooks";
import * as jsx from "preact/jsx-runtime";
import * as memo from "./memo";
import * as parts from "./parts";
import { changed } from "./state";

type Properties = { source: string; live: boolean };
/** What both scripts have in common; the second takes it from here. */
const shared: Record<string, unknown> & { Markdown?: any } = { preact, "preact/hooks": hooks, "preact/jsx-runtime": jsx, "./memo": memo, "./parts": parts };
let isAsked = false;
function load() {
    if (isAsked) return;
    isAsked = true;
    (globalThis as any).shardpack = shared;
    const script = document.createElement("script");
    // The policy names the hash of this text too.
    script.textContent = document.getElementById("answers")!.textContent;
    document.head.append(script);
    changed();
}
/** Whoever begins to do something will see an answer soon, which is not to wait for it. */
for (const sign of ["pointerdown", "keydown"]) addEventListener(sign, () => setTimeout(load, 50), { once: true, capture: true, passive: true });
export function Markdown(properties: Properties) {
    if (shared.Markdown) return <shared.Markdown {...properties} />;
    setTimeout(load);
    return <div class="plain">{properties.source}</div>;
}
