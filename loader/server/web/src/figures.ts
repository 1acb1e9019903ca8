// Figures over time, from looks at `/stats`: an hour of each model, and what its ranks send each other.
export type Sample = { at: number; rate: number; queue: number; running: number; step: number; drafted: number; accepted: number; acceptance: number };
const SAMPLES_MOST = 3600, ACCEPTANCE_MS = 10_000, TRAFFIC_MS = 5000;
const samples = new Map<string, Sample[]>();
/** Totals of ranks that count from the start of their process. */
const totals = new Map<string, { at: number; bytes: number }[]>();
const listOf = <T>(lists: Map<string, T[]>, key: string) => { const found = lists.get(key) ?? []; lists.set(key, found); return found; };

/** Percent of the draft tokens of the last seconds that were accepted; as before where none ran. */
function acceptance(known: Sample[], at: number, drafted: number, accepted: number) {
    const first = known.find((it) => at - it.at <= ACCEPTANCE_MS);
    // A server that was started again counts from 0.
    const from = first && first.drafted <= drafted ? first : { drafted: 0, accepted: 0 };
    return drafted > from.drafted ? (accepted - from.accepted) / (drafted - from.drafted) * 100 : known.at(-1)?.acceptance ?? 0;
}
/** Takes what one look found of a model. */
export function take(stats: any, at = Date.now()) {
    const known = listOf(samples, stats.model), nodes: any[] = stats.nodes ?? [], { run = 0, accepted = 0 } = stats.drafts ?? {};
    known.push({
        at, rate: stats.tokens_per_second, queue: stats.requests.waiting, running: stats.requests.running, step: Math.max(0, ...nodes.map((node) => node.step_ms ?? 0)),
        drafted: run, accepted, acceptance: acceptance(known, at, run, accepted),
    });
    if (known.length > SAMPLES_MOST) known.shift();
    for (const node of nodes) {
        // A rank that has taken no step has sent nothing; one that has and tells no bytes does not count them.
        const bytes: number | undefined = node.collective_bytes ?? (node.steps ? undefined : 0);
        if (bytes === undefined) continue;
        const told = listOf(totals, `${stats.model} ${node.rank}`);
        if (told.length && told.at(-1)!.bytes > bytes) told.length = 0;
        told.push({ at, bytes });
        // Ranks tell once a second and are asked once a second: two looks alone may see none or two reports.
        while (told.length > 2 && at - told[1].at >= TRAFFIC_MS) told.shift();
    }
}
export const samplesOf = (model: string): Sample[] => samples.get(model) ?? [];
/** Bytes a second that a rank gave to collectives in the last seconds; none if it does not count them. */
export function traffic(model: string, rank: number): number | undefined {
    const told = totals.get(`${model} ${rank}`), first = told?.[0], last = told?.at(-1);
    return first && last && (last.bytes - first.bytes) / Math.max(1, last.at - first.at) * 1000;
}
