/* The limit that the kernel is held against: libjpeg-turbo decoding the same crops at the same scales, and nothing
 * else. No resize, no output but one scratch buffer; the decompressor is reused; an error ends the process.
 */
#include <stdio.h>
#include <stdlib.h>

#include <jpeglib.h>

/* Decodes n images; boxes: x0, y0, x1, y1 of each. Returns the bytes of RGB that came out. */
size_t roi_decode(const unsigned char **images, const unsigned long *sizes, const double *boxes, int n, int out_width,
                  int out_height) {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    jpeg.err = jpeg_std_error(&errors);
    jpeg_create_decompress(&jpeg);
    unsigned char *pixels = NULL;
    size_t room = 0, total = 0;
    for (int i = 0; i < n; i++) {
        const double *box = boxes + 4 * i;
        jpeg_mem_src(&jpeg, (unsigned char *)images[i], sizes[i]);
        jpeg_read_header(&jpeg, TRUE);
        int denominator = 8;
        while (denominator > 1 &&
               (box[2] - box[0] < denominator * out_width || box[3] - box[1] < denominator * out_height))
            denominator /= 2;
        jpeg.scale_num = 1;
        jpeg.scale_denom = (unsigned)denominator;
        jpeg.out_color_space = JCS_RGB;
        jpeg_start_decompress(&jpeg);
        const unsigned left = (unsigned)box[0] / denominator, right = ((unsigned)box[2] + denominator - 1) / denominator;
        const unsigned top = (unsigned)box[1] / denominator, bottom = ((unsigned)box[3] + denominator - 1) / denominator;
        JDIMENSION x = left > 0 ? left - 1 : 0, width = right + 1 < jpeg.output_width ? right + 1 - x : jpeg.output_width - x;
        jpeg_crop_scanline(&jpeg, &x, &width);
        const size_t row = (size_t)width * 3;
        if (row * (bottom - top) > room) {
            free(pixels);
            pixels = malloc(room = row * (bottom - top));
            if (!pixels) exit(1);
        }
        if (top > 0) jpeg_skip_scanlines(&jpeg, top);
        while (jpeg.output_scanline < bottom) {
            unsigned char *rows[4];
            const unsigned at = jpeg.output_scanline - top, left_over = bottom - jpeg.output_scanline;
            const unsigned most = left_over < 4 ? left_over : 4;
            for (unsigned k = 0; k < most; k++) rows[k] = pixels + row * (at + k);
            jpeg_read_scanlines(&jpeg, rows, most);
        }
        jpeg_abort_decompress(&jpeg);
        total += row * (bottom - top);
    }
    jpeg_destroy_decompress(&jpeg);
    free(pixels);
    return total;
}
