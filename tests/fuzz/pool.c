/* Threads of the kernel on records of a cache, under sanitizers: several threads begin batches of random rows, wait for some and
 * drop the others while the pool grows and shrinks. The records are files as they are, mutated ones
 * whose sums are right, and ones with other bytes than their sums say. Each row must be what it is without threads.
 *
 *     pool_fuzz SECONDS RUNS SEED MAX_PIXELS FILE...
 *
 * Prints "runs R decoded D refused F" when nothing was found: rows, and those of them that were made and refused.
 */
#include <stdatomic.h>
#include <stdio.h>

#include "../../fastload/images/batch.h"
#include "../../fastload/images/write.h"

enum { SIDE = 16, ROW = SIDE * SIDE * 3, SEEDS = 8, SUBMITTERS = 4, MOST_RECORDS = 4096, MOST_ROWS = 24 };

static struct {
    Place place;
    int pixels;
} records[MOST_RECORDS];
static int count;
static uint8_t (*expected)[2][SEEDS][ROW]; /* of each record, law and seed */
static bool (*refused)[2][SEEDS];
static Law laws[2];
static uint64_t max_pixels;
static atomic_bool over;
static atomic_long runs, refusals;

static uint32_t draw(uint64_t *state, uint32_t n) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*state >> 33) * n >> 31);
}

static void die(const char *why) {
    printf("%s\n", why);
    fflush(stdout);
    abort();
}

static void put64(uint8_t *to, uint64_t value) {
    for (int i = 0; i < 8; i++) to[i] = (uint8_t)(value >> 8 * i);
}

/* Appends a record to the segment. broken: a byte of it is not what its sums say. */
static void add_record(int fd, const uint8_t *payload, size_t size, int pixels, bool broken, uint64_t *state) {
    if (count == MOST_RECORDS) return;
    const off_t offset = (lseek(fd, 0, SEEK_END) + 63) / 64 * 64;
    uint8_t place[PLACE_SIZE] = {0}, head[RECORD_HEAD];
    place[0] = (uint8_t)fd;
    for (int i = 4; i < 36; i++) place[i] = (uint8_t)draw(state, 256);
    put64(place + 36, size);
    put64(place + 44, size < SUM_LEAST ? 0 : sum_payload(payload, size));
    put64(place + 52, (uint64_t)offset);
    records[count].place = place_from(place);
    records[count++].pixels = pixels;
    memcpy(head, records[count - 1].place.head, sizeof head - 8);
    put64(head + 56, sum_header(head));
    uint8_t *whole = malloc(sizeof head + size);
    memcpy(whole, head, sizeof head);
    memcpy(whole + sizeof head, payload, size);
    if (broken) whole[draw(state, (uint32_t)(sizeof head + size))] ^= (uint8_t)(1 << draw(state, 8));
    if (pwrite(fd, whole, sizeof head + size, offset) != (ssize_t)(sizeof head + size)) die("the segment cannot be written");
    free(whole);
}

static void add_mutants(int fd, const uint8_t *payload, size_t size, int pixels, uint64_t *state) {
    add_record(fd, payload, size, pixels, false, state);
    add_record(fd, payload, size, pixels, true, state);
    uint8_t *mutant = malloc(size);
    for (int i = 0; i < 6; i++) {
        memcpy(mutant, payload, size);
        for (uint32_t n = draw(state, 4) + 1; n > 0; n--)
            mutant[draw(state, draw(state, 2) || size < 64 ? (uint32_t)size : 64)] = (uint8_t)draw(state, 256);
        add_record(fd, mutant, draw(state, 4) ? size : draw(state, (uint32_t)size) + 1, pixels, false, state);
    }
    free(mutant);
}

static void add_file(int fd, const char *path, uint64_t *state) {
    enum { MOST = 65536 };
    uint8_t *bytes = malloc(MOST);
    FILE *file = fopen(path, "rb");
    if (!file) exit(2);
    const size_t size = fread(bytes, 1, MOST, file);
    fclose(file);
    add_mutants(fd, bytes, size, 0, state);
    char message[MESSAGE_SIZE];
    Record record = {NULL, 0, 0};
    if (jpeg_to_record(bytes, size, max_pixels, 1, &record, message)) add_mutants(fd, record.data, record.size, 0, state);
    free(record.data);
    /* Pixels, as mode "decoded" keeps them: alone, and with an orientation. */
    for (size_t begin = 0; begin <= 5; begin += 5) {
        const size_t height = 5 + draw(state, 40), width = 5 + draw(state, 40), total = 64 + height * width * 3 + (begin ? 9 : 0);
        memset(bytes, 0, total);
        memcpy(bytes, "t\2\0\0", begin);
        memcpy(bytes + begin, "a\3\3|u1", 6);
        put64(bytes + begin + 6, height), put64(bytes + begin + 14, width), put64(bytes + begin + 22, 3);
        for (size_t i = 64; i < total; i++) bytes[i] = (uint8_t)draw(state, 256);
        if (begin) bytes[total - 9] = 'i';
        add_mutants(fd, bytes, total, 1, state);
    }
    free(bytes);
}

typedef struct {
    Batch batch;
    uint8_t out[MOST_ROWS][ROW];
    struct {
        int record, seed;
    } rows[MOST_ROWS];
    int law;
} Try;

static void begin_rows(Try *try, int pixels, int law, size_t n) {
    Batch *batch = &try->batch;
    memset(batch, 0, sizeof *batch);
    if (!batch_reserve(batch, n)) exit(2);
    batch->law = laws[try->law = law];
    batch->out = try->out[0];
    batch->rows = MOST_ROWS;
    batch->width = batch->height = SIDE;
    batch->clamp = law == 0;
    batch->pixels = pixels;
    batch->limits = (Limits){max_pixels, true};
    for (size_t i = 0; i < n; i++) {
        Task *task = batch->tasks + i;
        task->place = records[try->rows[i].record].place;
        task->size = (size_t)task->place.length;
        task->row = (ptrdiff_t)i;
        task->cut.seed = (uint64_t)try->rows[i].seed;
    }
    batch_begin(batch);
}

static void check(const Try *try) {
    for (size_t i = 0; i < try->batch.job.tasks; i++, runs++) {
        const int record = try->rows[i].record, seed = try->rows[i].seed;
        refusals += try->batch.tasks[i].failed;
        if (try->batch.tasks[i].failed != refused[record][try->law][seed]) die("a row is refused by threads alone, or not by them");
        if (!try->batch.tasks[i].failed && memcmp(try->out[i], expected[record][try->law][seed], ROW)) die("another row by threads");
    }
}

static void one_try(Try *try, uint64_t *state) {
    const int first = (int)draw(state, (uint32_t)count), pixels = records[first].pixels;
    const size_t n = draw(state, MOST_ROWS + 1);
    for (size_t i = 0; i < n; i++) {
        int record = (int)draw(state, (uint32_t)count);
        while (records[record].pixels != pixels) record = (int)draw(state, (uint32_t)count);
        try->rows[i].record = record;
        try->rows[i].seed = (int)draw(state, SEEDS);
    }
    begin_rows(try, pixels, (int)draw(state, 2), n);
}

static void *submit(void *seed) {
    uint64_t state = (uint64_t)(size_t)seed * 77 + 1;
    Try *tries = calloc(2, sizeof *tries);
    while (!over) {
        for (int i = 0; i < 2; i++) one_try(tries + i, &state);
        for (int i = 0; i < 2; i++) {
            if (draw(&state, 4) == 0) {
                pool_cancel(&tries[i].batch.job);
            } else {
                pool_wait(&tries[i].batch.job);
                check(tries + i);
            }
            batch_free(&tries[i].batch);
        }
    }
    free(tries);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 6) return 2;
    const long most = atol(argv[2]);
    uint64_t state = strtoull(argv[3], NULL, 10) * 2 + 1;
    max_pixels = strtoull(argv[4], NULL, 10);
    const int fd = open("segment", O_RDWR | O_CREAT | O_TRUNC, 0600);
    use_simd = cpu_has_simd();
    use_huffman = true;
    small_scan = 0;
    for (int i = 5; i < argc; i++) add_file(fd, argv[i], &state);
    laws[0] = random_law((double[]){0.1, 1}, (double[]){0.5, 2}, 0.5);
    laws[1] = (Law){.kind = CENTRE_BOX, .resize = {20, 0}};
    expected = calloc((size_t)count, sizeof *expected);
    refused = calloc((size_t)count, sizeof *refused);
    if (!pool_start() || fd < 0) return 2;
    Try *try = calloc(1, sizeof *try);
    for (int record = 0; record < count; record++)
        for (int law = 0; law < 2; law++) {
            for (int i = 0; i < SEEDS; i++) try->rows[i].record = record, try->rows[i].seed = i;
            begin_rows(try, records[record].pixels, law, SEEDS);
            pool_wait(&try->batch.job);
            for (int i = 0; i < SEEDS; i++) refused[record][law][i] = try->batch.tasks[i].failed;
            memcpy(expected[record][law], try->out, sizeof expected[record][law]);
            batch_free(&try->batch);
        }
    free(try);
    const double end = seconds_now() + atof(argv[1]);
    pthread_t submitters[SUBMITTERS];
    for (size_t i = 0; i < SUBMITTERS; i++) pthread_create(submitters + i, NULL, submit, (void *)i);
    while (seconds_now() < end && runs < most) {
        pool_resize(draw(&state, 5));
        usleep(draw(&state, 20000));
    }
    over = true;
    for (size_t i = 0; i < SUBMITTERS; i++) pthread_join(submitters[i], NULL);
    pool_resize(0);
    printf("runs %ld decoded %ld refused %ld\n", (long)runs, (long)(runs - refusals), (long)refusals);
    free(expected);
    free(refused);
    return 0;
}
