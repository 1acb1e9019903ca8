// Markdown, its formulas and colours are scripts of their own in the page: texts that are neither read nor set
// up before the page is drawn. That is done step by step while the browser has nothing else to do, so that
// neither the first paint nor the first answer pays for it.
import * as preact from "preact";
import * as hooks from "preact/hooks";
import * as jsx from "preact/jsx-runtime";
import * as memo from "./memo";
import * as parts from "./parts";
import { changed } from "./state";

type Properties = { source: string; live: boolean };
/** What all scripts have in common: later ones take it from here, and leave here what they bring. */
const shared: Record<string, any> & { steps: (() => void)[] } = { steps: [], preact, "preact/hooks": hooks, "preact/jsx-runtime": jsx, "./memo": memo, "./parts": parts };
/** Everything that is to be done; each step is short enough to stand between two frames. */
function* setUp() {
    (globalThis as any).shardpack = shared;
    for (const text of document.querySelectorAll('script[type="text/plain"]')) {
        const script = document.createElement("script");
        // The policy names the hash of this text too.
        script.textContent = text.textContent;
        document.head.append(script);
        script.remove(); text.remove();
        yield;
        for (const step of shared.steps.splice(0)) { step(); if (shared.Markdown) changed(); yield; }
    }
    shared.isReady = true;
}
const steps = setUp();
// Safari has no idle callbacks.
const whenIdle: (work: () => void) => void = globalThis.requestIdleCallback?.bind(globalThis) ?? ((work) => setTimeout(work, 30));
let isUrgent = false, turn = 0;
function go() {
    if (document.readyState === "loading") return addEventListener("DOMContentLoaded", go, { once: true });
    const mine = ++turn, step = () => { if (mine === turn && !steps.next().done) go(); };
    if (isUrgent) setTimeout(step); else whenIdle(step);
}
function hurry() { if (!isUrgent) { isUrgent = true; go(); } }
/** Sets everything up while nothing else is to be done. */
export const warm = go;
/** Whoever begins to do something will see an answer soon, which is not to wait for it. */
for (const sign of ["pointerdown", "keydown"]) addEventListener(sign, () => setTimeout(hurry, 50), { once: true, capture: true, passive: true });
export function Markdown(properties: Properties) {
    if (shared.Markdown) return <shared.Markdown {...properties} />;
    setTimeout(hurry);
    return <div class="plain">{properties.source}</div>;
}
