package main

// known maps a test that may fail with Watershed only to the reason. A failed spec or subtest fails its Go test too.
var known = map[string]string{
	"jobset/controller: go test TestAPIs": countsOldJob,
	"jobset/controller: JobSet controller jobset is created and its jobs go through a series of updates jobset with " +
		"VolumeClaimPolicies should create two PVC with Delete and Retain policies": countsOldJob,
	"kustomize-controller/controller: go test TestKustomizationReconciler_RESTMapper": crdRemains,
	"kustomize-controller/controller: go test TestKustomizationReconciler_RESTMapper/" +
		"discovery_fails_for_deleted_CRD": crdRemains,
	"lws/controllers: go test TestControllers": readsOldRevision,
	"lws/controllers: LeaderWorkerSet controller leaderWorkerSet creating or updating resize should update the size " +
		"of the replicas": readsOldRevision,
	"lws/controllers: LeaderWorkerSet controller leaderWorkerSet creating or updating Test default progressing " +
		"state": updatesOldObject,
}

const (
	countsOldJob = "The spec counts the first JobSet's job as the second's. If its list is faster than the controller, " +
		"it completes only the first job. It fails with kube-apiserver too, in 3 of 8 runs."
	crdRemains = "The test reads discovery without a wait for the deletion of its definition. It fails with " +
		"kube-apiserver too, in 1 of 2 complete runs."
	updatesOldObject = "The spec updates the status once, with an object that the controller may have changed since. " +
		"It fails with kube-apiserver too, in 1 of 8 runs on a busy machine."
	readsOldRevision = "The spec reads the revision of the leader's StatefulSet without a wait for the controller. Its " +
		"list of StatefulSets takes 10 ms with kube-apiserver, 3 ms with Watershed."
)
