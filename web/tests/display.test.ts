import { expect, test } from "vitest";
import { excerpt, bytes, label, labelOf, milliseconds, percent, shown, visible } from "../src/display.js";

test("what could hide or reorder text is visible", () => {
  expect(visible("a\u0000b\u001b[31m")).toBe("a\u2400b\u241b[31m");
  expect(visible("user\u202egnp.exe")).toBe("user[U+202E]gnp.exe");
  expect(visible("a\u200bb\ufeffc\u2066d\u{e0041}")).toBe("a[U+200B]b[U+FEFF]c[U+2066]d[U+E0041]");
  expect(visible("plain\ttext\nשלום مرحبا 👩")).toBe("plain\ttext\nשלום مرحبا 👩");
});

test("a token shows its text, and with marks what the text does not show", () => {
  const end = { id: 2, text: "", special: "<|im_end|>" };
  expect(shown(end, false)).toBe("");
  expect(shown(end, true)).toBe("⟨<|im_end|>⟩");
  const part = { id: 3, text: "", bytes: [0xe2, 0x98] };
  expect(shown(part, false)).toBe("");
  expect(shown(part, true)).toBe("⟨E2⟩⟨98⟩");
  expect(shown({ id: 4, text: " a\n" }, true)).toBe("·\u200ba↵\n");
  expect(shown({ id: 5, text: "<b>x</b>" }, false)).toBe("<b>x</b>");
});

test("labels are one line of bounded length", () => {
  expect(label("")).toBe("∅");
  expect(label("a\nb\t c")).toBe("a↵b→·c");
  expect(label("x".repeat(5000))).toHaveLength(28);
  expect(labelOf({ id: 1, text: "", bytes: [0xff] })).toBe("⟨FF⟩");
});

test("numbers read well", () => {
  expect([0, 1, 0.5, 0.9996, 0.001, 0.00004, NaN].map(percent)).toEqual(["0%", "100%", "50.0%", "99.96%", "0.10%", "0.004%", "–"]);
  expect([null, 0.5, 12.34, 250, 12_000].map(milliseconds)).toEqual(["–", "0.50 ms", "12.3 ms", "250 ms", "12.0 s"]);
  expect([12, 1500, 98_400_000].map(bytes)).toEqual(["12 B", "1.5 kB", "98.4 MB"]);
});

test("an excerpt is one line to be read", () => {
  expect(excerpt("  a b\n\nc\u202e", 20)).toBe("a b ↵ c[U+202E]");
  expect(excerpt("abcdef", 4)).toBe("abc…");
  expect(excerpt(" ", 4)).toBe("∅");
});

test("a share that is nearly all is not called all", () => {
  expect(percent(0.99999)).toBe(">99.99%");
  expect(percent(1)).toBe("100%");
});
