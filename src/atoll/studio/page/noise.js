// Noise as pictures start from it, for frames that are still empty.

const SIDE = 48;

/** A small picture of Gaussian noise, as the value of a CSS property. */
export function noise() {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [SIDE, SIDE];
  const pen = canvas.getContext("2d");
  const pixels = pen.createImageData(SIDE, SIDE);
  for (let place = 0; place < pixels.data.length; place += 1) {
    pixels.data[place] = place % 4 === 3 ? 255 : 150 + 40 * gaussian();
  }
  pen.putImageData(pixels, 0, 0);
  return `url(${canvas.toDataURL()})`;
}

/** Box and Muller's transform. */
function gaussian() {
  return Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
}
