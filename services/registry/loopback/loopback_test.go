package loopback_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/services/registry/internal/fixture"
)

// client-go calls the registry's handlers, and receives their errors as API errors.
func TestClientGoCallsHandlers(t *testing.T) {
	c, ctx := fixture.New(t).Client, t.Context()
	maps := c.CoreV1().ConfigMaps("x")
	made, err := maps.Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "a"},
		Data:       map[string]string{"k": "v"},
	}, metav1.CreateOptions{})
	if err != nil || made.UID == "" {
		t.Fatal(err)
	}
	if _, err := maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a"}},
		metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
		t.Errorf("created twice: %v", err)
	}
	made.Data["k"] = "w"
	if _, err := maps.Update(ctx, made, metav1.UpdateOptions{}); err != nil {
		t.Error(err)
	}
	if _, err := maps.Update(ctx, made, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("an update of an old version: %v", err)
	}
	if o, err := maps.Patch(ctx, "a", types.MergePatchType, []byte(`{"data":{"l":"x"}}`),
		metav1.PatchOptions{}); err != nil || len(o.Data) != 2 {
		t.Errorf("%v, %v", o, err)
	}
	if l, err := maps.List(ctx, metav1.ListOptions{}); err != nil || len(l.Items) != 1 || l.ResourceVersion == "" {
		t.Errorf("%v, %v", l, err)
	}
	if err := maps.Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
	if _, err := maps.Get(ctx, "a", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("a deleted object: %v", err)
	}
	if r, err := c.Discovery().ServerResourcesForGroupVersion("apps/v1"); err != nil || len(r.APIResources) < 5 {
		t.Errorf("%v, %v", r, err)
	}
	if r, err := c.Discovery().ServerResourcesForGroupVersion("apps/v9"); !apierrors.IsNotFound(err) {
		t.Errorf("resources of an unknown version: %v, %v", r, err)
	}
	if body, err := c.CoreV1().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx); err != nil || string(body) != "ok" {
		t.Errorf("/readyz: %q, %v", body, err)
	}
}

// A watch receives the selected events after its revision. A watch from before the log ends with Expired.
func TestWatchReadsTheCache(t *testing.T) {
	fx := fixture.New(t)
	event := func(revision int64, name, team string) *logv1.Event {
		return &logv1.Event{
			Type:            logv1.Type_TYPE_ADDED,
			Revision:        revision,
			StorageResource: "configmaps",
			Namespace:       "x",
			Name:            name,
			Object: &logv1.Object{
				Json:   []byte(`{"metadata":{"name":"` + name + `","namespace":"x"}}`),
				Labels: map[string]string{"team": team},
				Fields: map[string]string{"metadata.name": name},
			},
		}
	}
	apply := fx.WatchCache.Apply
	apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 100})
	apply(event(101, "a", "one"))
	watchFrom := func(rv string) watch.Interface {
		i, err := fx.Client.CoreV1().ConfigMaps("x").Watch(t.Context(), metav1.ListOptions{
			ResourceVersion: rv,
			LabelSelector:   "team=one",
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(i.Stop)
		return i
	}
	next := func(i watch.Interface) (string, string) {
		select {
		case e := <-i.ResultChan():
			if o, ok := e.Object.(*corev1.ConfigMap); ok {
				return string(e.Type), o.Name
			}
			return string(e.Type), string(apierrors.ReasonForError(apierrors.FromObject(e.Object)))
		case <-time.After(2 * time.Minute):
			return "nothing", ""
		}
	}
	i := watchFrom("100")
	if kind, name := next(i); kind != "ADDED" || name != "a" {
		t.Errorf("%s %s", kind, name)
	}
	apply(event(102, "b", "two"))
	apply(event(103, "c", "one"))
	if kind, name := next(i); kind != "ADDED" || name != "c" {
		t.Errorf("%s %s", kind, name)
	}
	if kind, reason := next(watchFrom("50")); kind != "ERROR" || reason != string(metav1.StatusReasonExpired) {
		t.Errorf("%s %s", kind, reason)
	}
	if _, err := fx.Resources.RequestScope(t.Context(), &commonv1.Resource{
		Group:    "none",
		Version:  "v1",
		Resource: "nones",
	}); !apierrors.IsNotFound(err) {
		t.Errorf("%v", err)
	}
}
