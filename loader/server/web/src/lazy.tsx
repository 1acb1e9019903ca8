// Markdown, its formulas and colours are set up when the first answer is shown: not before the first paint.
import { changed } from "./state";
type Properties = { source: string; live: boolean };
let full: ((properties: Properties) => any) | null = null, asked = false;
export function Markdown(properties: Properties) {
    if (full) { const Full = full as any; return <Full {...properties} />; }
    if (!asked) { asked = true; import("./markdown").then((module) => { full = module.Markdown as any; changed(); }); }
    return <div class="plain">{properties.source}</div>;
}
