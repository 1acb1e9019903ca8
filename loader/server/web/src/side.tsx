// The panel beside the chat: settings and models.
import { useState } from "preact/hooks";
import { size } from "./parts";
import { changed, fault, keep, manage, useStore } from "./state";
import { grouped, t } from "./strings";

const PRESETS: Record<keyof typeof t.presets, Record<string, number>> = { own: {}, precise: { temperature: 0.2, top_p: 0.9 }, balanced: { temperature: 0.7, top_p: 0.95 }, creative: { temperature: 1, top_p: 1, min_p: 0.05 } };
const FIELDS = [["temperature", t.temperature, "temperature"], ["top_p", t.topP, "top_p"], ["top_k", t.topK, "top_k"], ["min_p", t.minP, "min_p"], ["max_tokens", t.maxTokens, ""], ["seed", t.seed, ""]] as const;
/** Counts from the first digit on, and shows what is typed for as long as it is being typed: the page is drawn again meanwhile. */
function NumberField({ name, hint, value, set }: { name: string; hint: string; value?: number; set: (value?: number) => void }) {
    const [typed, setTyped] = useState<string>();
    const take = (text: string) => { setTyped(text); set(text.trim() && Number.isFinite(Number(text)) ? Number(text) : undefined); };
    return <label>{name}<input inputMode="decimal" placeholder={hint} value={typed ?? value ?? ""} onInput={(event) => take(event.currentTarget.value)} onBlur={() => setTyped(undefined)} /></label>;
}
export function SettingsPanel() {
    const { chat, props } = useStore(), { settings } = chat, defaults = props?.default_generation_settings?.params ?? {};
    const change = (work: () => void) => { work(); if (Object.keys(chat.messages).length) keep(chat); else changed(); };
    const chosen = Object.entries(PRESETS).find(([, values]) => JSON.stringify(Object.entries(values).sort()) === JSON.stringify(Object.entries(settings.sampling).filter(([name]) => name !== "seed" && name !== "max_tokens").sort()))?.[0] ?? "";
    const wrong = fault(settings);
    return <section class="panel"><label>{t.system}<textarea rows={4} placeholder={t.systemHint} value={settings.system} onInput={(event) => change(() => { settings.system = event.currentTarget.value; })} /></label>
        <h3>{t.sampling}</h3>
        <label>{t.preset}<select value={chosen} onChange={(event) => change(() => { const { seed, max_tokens } = settings.sampling; settings.sampling = { ...PRESETS[event.currentTarget.value as "own"], ...(seed === undefined ? {} : { seed }), ...(max_tokens === undefined ? {} : { max_tokens }) }; })}>{!chosen && <option value="" disabled>–</option>}{Object.entries(t.presets).map(([id, name]) => <option value={id}>{name}</option>)}</select></label>
        <div class="fields">{FIELDS.map(([id, name, own]) => <NumberField name={name} hint={own ? String(defaults[own] ?? "") : id === "seed" ? t.random : t.off} value={settings.sampling[id]}
            set={(value) => change(() => { if (value === undefined) delete settings.sampling[id]; else settings.sampling[id] = value; })} />)}</div>
        {props?.sampling_from && <p class="hint">{t.defaultsOf(props.sampling_from)}</p>}
        <label>{t.tools}<textarea class="mono" rows={6} spellcheck={false} placeholder={'[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]'} value={settings.tools} onInput={(event) => change(() => { settings.tools = event.currentTarget.value; })} /></label><p class="hint">{t.toolsHint}</p>
        <label>{t.schema}<textarea class="mono" rows={4} spellcheck={false} placeholder={'{"type": "object", "properties": {"answer": {"type": "string"}}}'} value={settings.schema} onInput={(event) => change(() => { settings.schema = event.currentTarget.value; })} /></label><p class="hint">{t.schemaHint}</p>
        {wrong && <p class="error" role="alert">{wrong}</p>}</section>;
}
export function ModelsPanel() {
    const { models, chat, busyModels, modelErrors, stats } = useStore(), many = (stats?.models?.length ?? 0) > 1;
    return <section class="panel">{models.map((model) => {
        const busy = busyModels[model.id], memory = (model.memory ?? []).reduce((sum: number, it: any) => sum + it.total_bytes, 0);
        return <div class="card model"><label class="pick">{many && <input type="radio" name="model" checked={(chat.settings.model ?? models[0].id) === model.id} onChange={() => { chat.settings.model = model.id; changed(); }} />}<b>{model.id}</b><span class={"state " + model.state}>{model.state}</span></label>
            <p class="hint">{grouped(model.max_model_len)} {t.tokens} {t.context}{memory > 0 && ` · ${size(memory)} ${t.memory}`}{model.source?.bits ? ` · ${model.source.bits} bit` : ""}</p>
            {model.state_detail && <p class="hint">{model.state_detail}</p>}{model.swap && <p class="hint">{model.swap}</p>}{modelErrors[model.id] && <p class="error" role="alert">{modelErrors[model.id]}</p>}
            {"pinned" in model && stats?.may_manage !== false && (busy ? <p class="hint">{busy === "load" ? t.loading : t.unloading}</p> : model.state === "loaded" ? <button type="button" onClick={() => manage(model.id, "unload")}>{t.unload}</button> : ["unloaded", "failed"].includes(model.state) && <button type="button" onClick={() => manage(model.id, "load")}>{t.load}</button>)}</div>;
    })}</section>;
}
