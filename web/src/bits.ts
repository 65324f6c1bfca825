// The bits of a float64, as text: two numbers are the same answer only if these are equal.

const view = new DataView(new ArrayBuffer(8));

export function bitsOf(value: number): string {
  view.setFloat64(0, value);
  return (view.getUint32(0).toString(16).padStart(8, "0") + view.getUint32(4).toString(16).padStart(8, "0")).toUpperCase();
}
