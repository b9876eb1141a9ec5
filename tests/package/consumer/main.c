/* The installed C interface, from C. */
#include <octile/octile.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  char header[32];
  octile_linear_description description;
  octile_plan* plan = NULL;

  snprintf(header, sizeof header, "%d.%d.%d", OCTILE_VERSION_MAJOR, OCTILE_VERSION_MINOR, OCTILE_VERSION_PATCH);
  if (strcmp(header, octile_version()) != 0 || octile_abi_version() != OCTILE_ABI_VERSION) {
    printf("the header is %s, the library %s\n", header, octile_version());
    return 1;
  }
  octile_linear_description_init(&description, sizeof description);
  description.m = 16;
  description.n = 256;
  description.k = 512;
  if (octile_linear_plan_create(&description, &plan) != OCTILE_OK) {
    printf("%s\n", octile_last_error());
    return 1;
  }
  printf("%s\n", octile_plan_sku(plan));
  octile_plan_destroy(plan);
  return 0;
}
