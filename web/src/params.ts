// The form of sampling parameters, made from the server's own list.

import { html, live, nothing, unlessEdited, type TemplateResult } from "./dom.js";
import type { Capabilities, Effective, Parameter, Params } from "./types.js";

const COMMON = ["max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop"];
// The page sets these itself.
export const OWN: ReadonlySet<string> = new Set(["n", "best_of", "beam", "logprobs", "prompt_logprobs", "trace", "trace_top", "trace_tokens"]);
export const SLIDERS: Record<string, { min: number; max: number; step: number }> = {
  temperature: { min: 0, max: 2, step: 0.05 },
  top_p: { min: 0.05, max: 1, step: 0.01 },
  top_k: { min: 0, max: 100, step: 1 },
  min_p: { min: 0, max: 0.5, step: 0.01 },
  repetition_penalty: { min: 1, max: 1.5, step: 0.01 },
};

type Change = (name: string, value: unknown) => void;

/** A parameter's name, which may break after an underscore where it is too long for its line. */
function breakable(name: string): unknown[] {
  return name.split("_").map((part, index) => (index ? html`_<wbr />${part}` : part));
}

export function paramForm(caps: Capabilities, params: Params, effective: Effective, change: Change): TemplateResult {
  const byName = new Map(caps.parameters.map((one) => [one.name, one]));
  const common = COMMON.flatMap((name) => byName.get(name) ?? []);
  const rest = caps.parameters.filter((one) => !COMMON.includes(one.name) && !OWN.has(one.name));
  const groups = [...new Set(rest.map((one) => one.group))];
  return html`
    <div class="params">
      ${common.map((one) => field(one, params, effective, change))}
      <details class="more">
        <summary>All parameters</summary>
        ${groups.map(
          (group) => html`<fieldset>
            <legend>${group}</legend>
            ${rest.filter((one) => one.group === group).map((one) => field(one, params, effective, change))}
          </fieldset>`,
        )}
      </details>
    </div>
  `;
}

export function originOf(one: Parameter, params: Params, effective: Effective): { value: unknown; origin: string } {
  if (params[one.name] !== undefined) return { value: params[one.name], origin: "request" };
  const known = effective[one.name];
  return known && known.origin !== "request" ? known : { value: one.value, origin: one.origin };
}

function field(one: Parameter, params: Params, effective: Effective, change: Change): TemplateResult {
  const { value, origin } = originOf(one, params, effective);
  const id = `p-${one.name}`;
  const isSet = params[one.name] !== undefined;
  return html`
    <div class="param ${isSet ? "set" : ""}">
      <label for=${id} title=${one.help}>${breakable(one.name)}</label>
      <span class="origin" title="Who set the value in force: ${origin}">${origin}</span>
      <span class="control">${control(one, id, value, isSet, change)}</span>
      ${isSet
        ? html`<button class="clear" type="button" title="Back to the ${one.origin} value" aria-label="Clear ${one.name}"
            @click=${() => change(one.name, undefined)}>×</button>`
        : nothing}
    </div>
  `;
}

function control(one: Parameter, id: string, value: unknown, isSet: boolean, change: Change): TemplateResult {
  const { name, schema } = one;
  const kind = schema["type"];
  const words = schema["enum"] as string[] | undefined;
  if (kind === "boolean")
    return html`<input id=${id} type="checkbox" .checked=${live(value === true)} @change=${(event: Event) => change(name, (event.target as HTMLInputElement).checked)} />`;
  if (words)
    return html`<select id=${id} .value=${live(String(value ?? ""))} @change=${(event: Event) => change(name, (event.target as HTMLSelectElement).value)}>
      ${words.map((word) => html`<option value=${word} ?selected=${word === value}>${word}</option>`)}
    </select>`;
  if (kind === "number" || kind === "integer") {
    const isDrawn = name === "seed" && !isSet; // the seed that was drawn last is told, and not asked for again
    const shown = typeof value === "number" && !isDrawn ? String(value) : "";
    const read = (event: Event): void => {
      const text = (event.target as HTMLInputElement).value;
      change(name, text === "" ? undefined : Number(text));
    };
    const range = SLIDERS[name];
    return html`
      ${range
        ? html`<input type="range" aria-label="${name} slider" min=${range.min} max=${range.max} step=${range.step}
            .value=${live(shown)} @input=${read} />`
        : nothing}
      <input id=${id} type="number" step=${kind === "integer" ? 1 : "any"} min=${(schema["minimum"] as number | undefined) ?? nothing}
        max=${(schema["maximum"] as number | undefined) ?? nothing}
        placeholder=${isDrawn ? `drawn${typeof value === "number" ? `, last ${value}` : ""}` : "none"} .value=${unlessEdited(id, shown)} @change=${read} />
    `;
  }
  if (name === "stop" || name === "bad_words" || name === "dry_sequence_breakers") {
    const list = Array.isArray(value) ? (value as string[]) : typeof value === "string" ? [value] : [];
    return html`<textarea id=${id} rows="1" placeholder="one a line; \\n is a line break"
      .value=${unlessEdited(id, list.map(escapeLine).join("\n"))} @change=${(event: Event) => {
        const lines = (event.target as HTMLTextAreaElement).value.split("\n").filter((line) => line !== "").map(unescapeLine);
        change(name, lines.length ? lines : undefined);
      }}></textarea>`;
  }
  const isText = kind === "string";
  const text = isText ? String(value ?? "") : isSet ? JSON.stringify(value) : "";
  return html`<input id=${id} type="text" spellcheck="false" placeholder=${isText ? "none" : `JSON · ${preview(value)}`} .value=${unlessEdited(id, text)}
    @change=${(event: Event) => {
      const input = event.target as HTMLInputElement;
      input.setCustomValidity("");
      if (input.value === "") return change(name, undefined);
      if (isText) return change(name, input.value);
      try {
        change(name, JSON.parse(input.value));
      } catch {
        input.setCustomValidity("This is not JSON.");
        input.reportValidity();
      }
    }} />`;
}

function preview(value: unknown): string {
  const text = value === null || value === undefined ? "none" : JSON.stringify(value);
  return text.length > 24 ? text.slice(0, 23) + "…" : text;
}

export const escapeLine = (text: string): string => text.replace(/\\/g, "\\\\").replace(/\n/g, "\\n").replace(/\t/g, "\\t");

export function unescapeLine(text: string): string {
  return text.replace(/\\(.)/g, (_, letter: string) => (letter === "n" ? "\n" : letter === "t" ? "\t" : letter));
}
