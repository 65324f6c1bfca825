// Small helpers over the document.

import { noChange } from "lit-html";
import { live } from "lit-html/directives/live.js";

export { html, svg, render, nothing, type TemplateResult } from "lit-html";
export { repeat } from "lit-html/directives/repeat.js";
export { live };

/** The value of a field that is read when its editing ends: what is being typed into it now stays. */
export const unlessEdited = (id: string, value: string): unknown => (document.activeElement?.id === id ? noChange : live(value));

export function make<K extends keyof HTMLElementTagNameMap>(tag: K, name = "", text = ""): HTMLElementTagNameMap[K] {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text) node.textContent = text;
  return node;
}

/** Calls `act` once no call has come for `wait` milliseconds. */
export function debounce<A extends unknown[]>(wait: number, act: (...values: A) => void): (...values: A) => void {
  let timer: ReturnType<typeof setTimeout> | undefined;
  return (...values: A) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...values), wait);
  };
}

export async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", "offscreen");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
