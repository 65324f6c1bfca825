// How a token's text is shown. Model text is untrusted: what could hide, reorder or overwrite text becomes visible.

import type { Token } from "./types.js";

// Controls (but tab and newline), soft hyphen, zero widths, direction marks and overrides, line separators, invisible
// operators, byte order mark, interlinear marks, tags.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;

export function visible(text: string): string {
  return text.replace(HIDDEN, (found) => {
    const code = found.codePointAt(0) ?? 0;
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  });
}

/** Blanks and the like as signs. Lines may still break at a blank. */
export function withMarks(text: string): string {
  return visible(text).replace(/ /g, "·\u200b").replace(/\t/g, "→\t").replace(/\n/g, "↵\n");
}

/** What stands for a token in an answer. With `marks`, blanks, newlines, control tokens and bytes are shown too. */
export function shown(token: Token, marks: boolean): string {
  if (token.special !== undefined && token.text === "") return marks ? `⟨${visible(token.special)}⟩` : "";
  if (token.text === "" && token.bytes) return marks ? token.bytes.map((byte) => `⟨${hex(byte)}⟩`).join("") : "";
  return marks ? withMarks(token.text) : visible(token.text);
}

const hex = (byte: number): string => byte.toString(16).toUpperCase().padStart(2, "0");

/** The beginning of a text on one line, to be read. */
export function excerpt(text: string, most: number): string {
  const points = [...visible(text).replace(/\n+/g, " ↵ ").trim()];
  return points.length > most ? points.slice(0, most - 1).join("") + "…" : points.join("") || "∅";
}

/** A token's name on one line, for tables, labels and buttons. Cut after `most` characters. */
export function label(text: string, most = 28): string {
  if (text === "") return "∅";
  const line = visible(text).replace(/ /g, "·").replace(/\t/g, "→").replace(/\n/g, "↵");
  const points = [...line];
  return points.length > most ? points.slice(0, most - 1).join("") + "…" : line;
}

export function labelOf(token: Token, most = 28): string {
  if (token.special !== undefined) return `⟨${label(token.special, most)}⟩`;
  if (token.bytes) return token.bytes.map((byte) => `⟨${hex(byte)}⟩`).join("");
  return label(token.text, most);
}

export function percent(share: number): string {
  if (!Number.isFinite(share)) return "–";
  const value = share * 100;
  if (value === 0 || value === 100) return `${value}%`;
  if (value > 99.995 && value < 100) return ">99.99%";
  if (value > 0 && value < 0.01) return value < 1e-6 ? "≈0%" : `${value.toPrecision(1)}%`;
  return `${value.toFixed(value >= 99.95 || value < 0.995 ? 2 : 1)}%`;
}

export function milliseconds(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 100) return `${Math.round(value)} ms`;
  return `${value.toFixed(value >= 10 ? 1 : 2)} ms`;
}

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value.toFixed(value >= 100 || unit === 0 ? 0 : 1)} ${units[unit]}`;
}

export const count = (value: number): string => value.toLocaleString("en-US");
