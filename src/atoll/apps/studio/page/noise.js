// Gaussian noise as a placeholder for images without a preview yet.

const SIDE = 48; // pixels; the page enlarges it, so the grains stay visible
const MEAN = 150; // light gray: fits both color schemes
const STD = 40; // a visible contrast, of which little lies outside 0..255

/** Return an image of Gaussian noise as the value of a CSS property. */
export function noise() {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [SIDE, SIDE];
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(SIDE, SIDE);
  for (let index = 0; index < pixels.data.length; index += 1) {
    // RGBA: every fourth value is the opacity. The array clamps values to 0..255.
    pixels.data[index] = index % 4 === 3 ? 255 : MEAN + STD * gaussian();
  }
  context.putImageData(pixels, 0, 0);
  return `url(${canvas.toDataURL()})`;
}

/** Return a standard normal number by the Box-Muller transform. */
function gaussian() {
  return Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
}
