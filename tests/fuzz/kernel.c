/* Mutates real JPEGs, records of them and JPEGs with an index of their rows, and decodes all with the kernel's own code, under
 * AddressSanitizer and UBSan. The record of a mutated JPEG must give the pixels of that JPEG, with an index of its rows it
 * must give the same, and our Huffman decoder must give those of libjpeg's, and its errors.
 *
 *     kernel_fuzz SECONDS RUNS SEED MAX_PIXELS FILE...
 *
 * Prints "runs R decoded D refused F" when nothing was found. The mutant at work is kept in the file `last.jpg`
 * of the working directory only when the process dies (by the sanitizers' death callback), to be replayed.
 */
#include <stdio.h>
#include <time.h>

#include "../../fastload/images/write.h"

#include <sanitizer/asan_interface.h>

#define MOST 65536

static uint8_t *data; /* exactly as large as the mutant, so that a read behind it is seen */
static size_t size;
static uint64_t state;

static uint32_t draw(uint32_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 33) * n >> 31);
}

static void keep(void) {
    FILE *file = fopen("last.jpg", "wb");
    if (!file) return;
    fwrite(data, 1, size, file);
    fclose(file);
}

static void die(const char *why) {
    printf("%s\n", why);
    fflush(stdout);
    keep();
    abort();
}

static uint8_t *load(const char *path, size_t *n) {
    FILE *file = fopen(path, "rb");
    if (!file) exit(2);
    uint8_t *bytes = malloc(MOST);
    *n = fread(bytes, 1, MOST, file);
    fclose(file);
    return bytes;
}

/* A position: as often in the header, where structure is, as anywhere. */
static size_t place(size_t n) { return draw(2) ? draw((uint32_t)n) : draw(n < 700 ? (uint32_t)n : 700); }

static void mutate(const uint8_t *seed, size_t n, const uint8_t *other, size_t m) {
    static const uint8_t interesting[] = {0, 1, 2, 4, 8, 0x11, 0x22, 0x41, 0x7f, 0x80, 0xc0, 0xc2, 0xc4, 0xd8, 0xda, 0xff};
    uint8_t *work = malloc(2 * MOST);
    memcpy(work, seed, n);
    for (uint32_t round = draw(6) + 1; round > 0; round--) {
        const size_t at = place(n), length = draw(64) + 1;
        switch (draw(7)) {
            case 0: work[at] ^= (uint8_t)(1 << draw(8)); break;
            case 1: work[at] = (uint8_t)draw(256); break;
            case 2: work[at] = interesting[draw(sizeof interesting)]; break;
            case 3: /* cut */
                if (draw(3) == 0 && at > 4) n = at;
                break;
            case 4: /* remove a piece */
                if (at + length < n) {
                    memmove(work + at, work + at + length, n - at - length);
                    n -= length;
                }
                break;
            case 5: /* repeat a piece */
                if (at + length < n && n + length < MOST) {
                    memmove(work + at + length, work + at, n - at);
                    n += length;
                }
                break;
            default: /* a piece of another file */
                if (m > length && at + length < n) memcpy(work + at, other + draw((uint32_t)(m - length)), length);
        }
    }
    free(data);
    data = malloc(n);
    memcpy(data, work, n);
    size = n;
    free(work);
}

/* Dies where the record of the mutant has other pixels than the mutant itself, or is refused where that is not. */
static void compare(uint64_t max_pixels) {
    char message[MESSAGE_SIZE];
    const Limits limits = {max_pixels, true};
    Record record = {NULL, 0, 0};
    int width, height;
    if (jpeg_to_record(data, size, max_pixels, 1, &record, message) &&
        jpeg_header(data, size, &limits, &width, &height, message)) {
        uint8_t *exact = malloc(record.size); /* a read behind it is seen */
        memcpy(exact, record.data, record.size);
        const int denominator = 1 << draw(4);
        const int w = (width + denominator - 1) / denominator, h = (height + denominator - 1) / denominator;
        uint8_t *pixels[2] = {calloc((size_t)w * h, 3), calloc((size_t)w * h, 3)};
        Buffer cmyk = {NULL, 0};
        const bool plain = jpeg_decode(data, size, &limits, denominator, pixels[0], w, h, &cmyk, message);
        const bool kept = jpeg_decode(exact, record.size, &limits, denominator, pixels[1], w, h, &cmyk, message);
        if (plain && !kept) die("a record is refused");
        if (plain && memcmp(pixels[0], pixels[1], (size_t)w * h * 3)) die("a record of other pixels");
        buffer_free(&cmyk);
        free(pixels[0]);
        free(pixels[1]);
        free(exact);
    }
    free(record.data);
}

/* Dies where a crop of the mutant has other pixels with an index of its rows, or makes another index on the way. */
static void compare_rows(uint64_t max_pixels) {
    enum { SIDE = 40 };
    char message[MESSAGE_SIZE];
    const Limits limits = {max_pixels, draw(2)};
    Record index = {NULL, 0, 0};
    int width, height;
    use_huffman = true;
    if (jpeg_to_rows(data, size, max_pixels, &index, message) && jpeg_header(data, size, &limits, &width, &height, message)) {
        uint8_t *exact = malloc(index.size + size); /* a read behind it is seen */
        memcpy(exact, index.data, index.size);
        memcpy(exact + index.size, data, size);
        Box box = {draw((uint32_t)width), draw((uint32_t)height), 0, 0};
        box.x1 = box.x0 + 1 + draw((uint32_t)(width - box.x0));
        box.y1 = box.y0 + 1 + draw((uint32_t)(height - box.y0));
        uint8_t *pixels[2] = {malloc(SIDE * SIDE * 3), malloc(SIDE * SIDE * 3)}, *made = calloc(1, index.size);
        Scratch scratch;
        memset(&scratch, 0, sizeof scratch);
        for (int indexed = 0; indexed < 2; indexed++) {
            const Target target = {pixels[indexed], SIDE, SIDE * SIDE};
            const IndexRoom room = {indexed ? NULL : made, index.size};
            const uint8_t *from = indexed ? exact : data;
            const Cut cut = {&(Law){GIVEN_BOX}, box, false, 0};
            if (!jpeg_crop_resize(from, indexed ? index.size + size : size, &limits, &cut, SIDE, SIDE, true, target, room, &scratch,
                                  message))
                die("a file with an index is refused");
        }
        scratch_free(&scratch);
        if (memcmp(pixels[0], pixels[1], SIDE * SIDE * 3)) die("other pixels with an index of rows");
        if (memcmp(made, index.data, index.size)) die("a crop makes another index of rows");
        free(pixels[0]);
        free(pixels[1]);
        free(made);
        free(exact);
    }
    free(index.data);
}

static size_t attempted; /* bytes of pixels */

/* One decode or crop of the mutant, drawn from `state`: its pixels to `out`. */
static bool attempt(uint64_t max_pixels, char *message, uint8_t *out) {
    const Limits limits = {max_pixels, draw(2)};
    int width, height;
    use_simd = draw(2) && cpu_has_simd();
    if (!jpeg_header(data, size, &limits, &width, &height, message)) return false;
    if (draw(8) == 0) {
        const int denominator = 1 << draw(4);
        const int w = (width + denominator - 1) / denominator, h = (height + denominator - 1) / denominator;
        uint8_t *exact = malloc((size_t)w * h * 3); /* a write behind it is seen */
        Buffer cmyk = {NULL, 0};
        const bool done = jpeg_decode(data, size, &limits, denominator, exact, w, h, &cmyk, message);
        buffer_free(&cmyk);
        memcpy(out, exact, attempted = (size_t)w * h * 3);
        free(exact);
        return done;
    }
    const int out_width = (int)draw(70) + 1, out_height = (int)draw(70) + 1;
    Box box = {draw((uint32_t)width), draw((uint32_t)height), 0, 0};
    box.x1 = box.x0 + 1 + draw((uint32_t)(width - box.x0));
    box.y1 = box.y0 + 1 + draw((uint32_t)(height - box.y0));
    if (draw(4) == 0) box.x1 += 0.5, box.y0 -= 0.25; /* at times a little, or entirely, outside */
    uint8_t *exact = malloc((size_t)out_width * out_height * 3);
    const bool last = draw(2);
    const Target target = {exact, last ? 3 * out_width : out_width, last ? 1 : (ptrdiff_t)out_width * out_height};
    Scratch scratch;
    memset(&scratch, 0, sizeof scratch);
    const bool clamp = draw(2);
    const Cut cut = {&(Law){GIVEN_BOX}, box, draw(2), 0};
    const bool done = jpeg_crop_resize(data, size, &limits, &cut, out_width, out_height, clamp, target, (IndexRoom){NULL, 0},
                                       &scratch, message);
    scratch_free(&scratch);
    memcpy(out, exact, attempted = (size_t)out_width * out_height * 3);
    free(exact);
    return done;
}

/* Dies where our Huffman decoder gives other pixels than libjpeg's, or another error. */
static bool attempts(uint64_t max_pixels) {
    static uint8_t *pixels[2];
    char messages[2][MESSAGE_SIZE] = {"", ""};
    bool done[2];
    if (draw(4) == 0) compare(max_pixels);
    if (draw(4) == 0) compare_rows(max_pixels);
    small_scan = draw(8) ? 0 : 4096;
    const uint64_t before = state;
    for (int own = 0; own < 2; own++) {
        if (!pixels[own]) pixels[own] = malloc(max_pixels * 3);
        state = before;
        use_huffman = own;
        done[own] = attempt(max_pixels, messages[own], pixels[own]);
    }
    if (has_rows(data, size)) return done[1]; /* nobody can tell a wrong index from a right one */
    if (done[0] != done[1] || (done[0] ? memcmp(pixels[0], pixels[1], attempted) : strcmp(messages[0], messages[1]))) {
        printf("libjpeg: %d %s; huffman.h: %d %s\n", done[0], messages[0], done[1], messages[1]);
        fflush(stdout);
        keep();
        abort();
    }
    return done[0];
}

int main(int argc, char **argv) {
    if (argc < 6) return 2;
    const time_t end = time(NULL) + atoi(argv[1]);
    const long most = atol(argv[2]);
    const uint64_t max_pixels = strtoull(argv[4], NULL, 10);
    state = strtoull(argv[3], NULL, 10) * 2 + 1;
    const int given = argc - 5;
    int files = given; /* the JPEGs, then the records and the files with an index of those that have one */
    uint8_t **seeds = malloc(sizeof *seeds * (size_t)given * 3);
    size_t *sizes = malloc(sizeof *sizes * (size_t)given * 3);
    for (int i = 0; i < given; i++) {
        Record record = {NULL, 0, 0};
        char message[MESSAGE_SIZE];
        seeds[i] = load(argv[5 + i], sizes + i);
        if (jpeg_to_record(seeds[i], sizes[i], max_pixels, 1, &record, message) && record.size < MOST)
            seeds[files] = record.data, sizes[files++] = record.size;
        else
            free(record.data);
        Record index = {NULL, 0, 0};
        small_scan = 0;
        if (jpeg_to_rows(seeds[i], sizes[i], max_pixels, &index, message) && index.size + sizes[i] < MOST) {
            seeds[files] = malloc(MOST);
            memcpy(seeds[files], index.data, index.size);
            memcpy(seeds[files] + index.size, seeds[i], sizes[i]);
            sizes[files++] = index.size + sizes[i];
        }
        free(index.data);
    }
    __asan_set_death_callback(keep);
    long runs = 0, decoded = 0;
    while (time(NULL) < end && runs < most)
        for (int i = 0; i < 20; i++, runs++) {
            const uint32_t one = draw((uint32_t)files), other = draw((uint32_t)files);
            mutate(seeds[one], sizes[one], seeds[other], sizes[other]);
            decoded += attempts(max_pixels);
        }
    printf("runs %ld decoded %ld refused %ld\n", runs, decoded, runs - decoded);
    for (int i = 0; i < files; i++) free(seeds[i]);
    free(seeds);
    free(sizes);
    free(data);
    return 0;
}
