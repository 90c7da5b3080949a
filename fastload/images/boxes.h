/* Which part of an image becomes the result: given, or chosen by the law of a transform once the size is known.
 *
 * The laws are those of RandomResizedCrop and CenterCrop in transforms.py, and the random numbers those of SampleRng in rng.py:
 * the same to the bit, which the tests hold. The same operations in the same order, on doubles.
 */
#ifndef FASTLOAD_BOXES_H
#define FASTLOAD_BOXES_H

#include "resize.h"

enum { GIVEN_BOX, RANDOM_BOX, CENTRE_BOX };

typedef struct {
    int kind;
    double scale[2], ratio[2], log_ratio[2], flip; /* RANDOM_BOX */
    double resize[2];                              /* CENTRE_BOX: height and width; the shorter side and 0; or 0 and 0 */
} Law;

static Law random_law(const double *scale, const double *ratio, double flip) {
    return (Law){RANDOM_BOX, {scale[0], scale[1]}, {ratio[0], ratio[1]}, {log(ratio[0]), log(ratio[1])}, flip, {0, 0}};
}

typedef struct {
    const Law *law;
    Box box; /* GIVEN_BOX */
    bool flip;
    uint64_t seed; /* RANDOM_BOX */
} Cut;

/* ---------------------------------------------------------------- random numbers */

static uint64_t random_bits(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static double random_double(uint64_t *state) { return (double)(random_bits(state) >> 11) * 0x1p-53; }

static double random_between(uint64_t *state, const double *bounds) {
    return bounds[0] + (bounds[1] - bounds[0]) * random_double(state);
}

static double random_below(uint64_t *state, double count) {
    return (double)(uint64_t)((unsigned __int128)random_bits(state) * (uint64_t)count >> 64);
}

/* ---------------------------------------------------------------- laws */

static Box box_at(double left, double top, double columns, double rows) { return (Box){left, top, left + columns, top + rows}; }

static Box random_place(const Law *law, double width, double height, uint64_t *state) {
    const double area = height * width;
    for (int i = 0; i < 10; i++) {
        const double target = area * random_between(state, law->scale);
        const double aspect = exp(random_between(state, law->log_ratio));
        const double columns = rint(sqrt(target * aspect)), rows = rint(sqrt(target / aspect));
        if (columns > 0 && columns <= width && rows > 0 && rows <= height) {
            const double top = random_below(state, height - rows + 1), left = random_below(state, width - columns + 1);
            return box_at(left, top, columns, rows);
        }
    }
    double columns = width, rows = height;
    if (width / height < law->ratio[0])
        rows = fmax(1, rint(width / law->ratio[0]));
    else if (width / height > law->ratio[1])
        columns = fmax(1, rint(height * law->ratio[1]));
    return box_at(floor((width - columns) / 2), floor((height - rows) / 2), columns, rows);
}

/* Of one axis: from where to where in the image. False: the result is larger, and gets a black frame. */
static bool centre_axis(double length, double resized, int size, double *from, double *to) {
    const double first = rint((resized - size) / 2), scale = length / resized;
    *from = first * scale;
    *to = fmin(length, (first + size) * scale);
    return resized >= size;
}

static bool centre_place(const Law *law, double width, double height, int out_width, int out_height, Box *box) {
    double resized_width = width, resized_height = height;
    const double side = law->resize[0];
    if (law->resize[1] > 0)
        resized_height = side, resized_width = law->resize[1];
    else if (side > 0 && width <= height)
        resized_width = side, resized_height = floor(side * height / width);
    else if (side > 0)
        resized_width = floor(side * width / height), resized_height = side;
    return centre_axis(width, resized_width, out_width, &box->x0, &box->x1) &&
           centre_axis(height, resized_height, out_height, &box->y0, &box->y1);
}

/* The box and the flip for an image of that size. Returns NULL, or why there is none. */
static const char *choose_box(const Cut *cut, double width, double height, int out_width, int out_height, Box *box, bool *flip) {
    uint64_t state = cut->seed;
    *flip = false;
    switch (cut->law->kind) {
        case GIVEN_BOX:
            *box = cut->box;
            *flip = cut->flip;
            break;
        case RANDOM_BOX:
            *box = random_place(cut->law, width, height, &state);
            *flip = cut->law->flip > 0 && random_double(&state) < cut->law->flip;
            break;
        default:
            if (!centre_place(cut->law, width, height, out_width, out_height, box))
                return "a result that is larger than the image has a black frame, which Python makes";
    }
    /* Written so that NaN fails. */
    const bool inside = box->x0 >= 0 && box->y0 >= 0 && box->x1 - box->x0 >= 1e-6 && box->y1 - box->y0 >= 1e-6 &&
                        box->x1 <= width && box->y1 <= height;
    return inside ? NULL : "the box is not inside the image";
}

#endif
