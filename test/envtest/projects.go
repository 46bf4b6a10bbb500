package main

// project is a project with suites that start a control plane.
type project struct {
	name string
	// module is the project's module with its version. The tests run in a copy of it, with its own go.mod.
	module string
	// root is the directory of the packages.
	root     string
	packages []string
	// ginkgo is set if the packages have suites of Ginkgo. Other packages have Go tests only.
	ginkgo bool
	// files maps directories of the copy to the module directories that fill them.
	files map[string]source
	// kustomizations maps files of the copy to the kustomizations that fill them.
	kustomizations map[string]string
	// edits maps files of the copy to pairs of a text and its replacement.
	edits map[string][]string
}

// source is a directory of a module. A module without a version has the version of the project's go.mod.
type source struct{ module, dir string }

var projects = []project{
	{
		name:   "controller-runtime",
		module: "sigs.k8s.io/controller-runtime@v0.24.1",
		root:   "pkg",
		packages: []string{
			"builder", "cache", "client", "client/apiutil", "cluster", "controller", "controller/controllerutil",
			"envtest", "handler", "internal/controller", "internal/recorder", "internal/testing/controlplane",
			"manager", "manager/internal/integration", "metrics/filters", "reconcile", "source",
			"webhook",
		},
		ginkgo: true,
	},
	{
		name:   "kueue",
		module: "sigs.k8s.io/kueue@v0.17.0",
		root:   "test/integration/singlecluster",
		packages: []string{
			"controller/admissionchecks/provisioning", "controller/core", "controller/dra",
			"controller/failurerecovery", "controller/jobframework/setup", "controller/jobs/appwrapper",
			"controller/jobs/jobset", "controller/jobs/mpijob", "controller/jobs/paddlejob",
			"controller/jobs/raycluster", "controller/jobs/sparkapplication", "controller/jobs/statefulset",
			"controller/jobs/trainjob", "conversion", "importer", "scheduler/podsready",
			"scheduler/resourcetransformations", "webhook/core", "webhook/jobs",
		},
		ginkgo: true,
		files: map[string]source{
			"dep-crds/appwrapper-crds":        {"github.com/project-codeflare/appwrapper", "config/crd/bases"},
			"dep-crds/cluster-autoscaler":     {"k8s.io/autoscaler/cluster-autoscaler/apis", "config/crd"},
			"dep-crds/jobset-operator":        {"sigs.k8s.io/jobset", "config/components/crd/bases"},
			"dep-crds/kf-trainer-crds":        {"github.com/kubeflow/trainer/v2", "manifests/base/crds"},
			"dep-crds/mpi-operator":           {"github.com/kubeflow/mpi-operator", "manifests/base"},
			"dep-crds/ray-operator-crds":      {"github.com/ray-project/kuberay/ray-operator", "config/crd/bases"},
			"dep-crds/spark-operator-crds":    {"github.com/kubeflow/spark-operator/v2", "config/crd/bases"},
			"dep-crds/training-operator-crds": {"github.com/kubeflow/training-operator", "manifests/base/crds"},
		},
		kustomizations: map[string]string{"config/components/crd/_output/crds.yaml": "config/components/crd"},
		// mpi-operator has a newer definition of MPIJob.
		edits: map[string][]string{"dep-crds/training-operator-crds/kubeflow.org_mpijobs.yaml": {
			"kind: CustomResourceDefinition", "kind: Unused",
		}},
	},
	{
		name:     "jobset",
		module:   "sigs.k8s.io/jobset@v0.11.1",
		root:     "test/integration",
		packages: []string{"controller", "webhook"},
		ginkgo:   true,
	},
	{
		name:     "lws",
		module:   "sigs.k8s.io/lws@v0.8.0",
		root:     "test/integration",
		packages: []string{"controllers", "webhooks"},
		ginkgo:   true,
	},
	{
		name:     "trainer",
		module:   "github.com/kubeflow/trainer/v2@v2.2.0",
		root:     "test/integration",
		packages: []string{"controller", "webhooks"},
		ginkgo:   true,
		files: map[string]source{
			"manifests/external-crds/jobset-operator":   {"sigs.k8s.io/jobset", "config/components/crd/bases"},
			"manifests/external-crds/scheduler-plugins": {"sigs.k8s.io/scheduler-plugins", "manifests/coscheduling"},
			"manifests/external-crds/volcano":           {"sigs.k8s.io/lws@v0.8.0", "test/integration/crd"},
		},
		edits: map[string][]string{"test/integration/framework/framework.go": {
			"scheduling.volcano.sh_podgroups.yaml", "volcano-podgroup.yaml",
		}},
	},
	{
		name:     "kustomize-controller",
		module:   "github.com/fluxcd/kustomize-controller@v1.9.6",
		root:     "internal",
		packages: []string{"controller"},
		files: map[string]source{
			"api":              {"github.com/fluxcd/kustomize-controller/api@v1.9.6", ""},
			"config/crd/bases": {"github.com/fluxcd/source-controller@v1.9.6", "config/crd/bases"},
		},
		// The suite starts a container of OpenBao, which a test of decryption needs. That test fails without it.
		edits: map[string][]string{"internal/controller/suite_test.go": {
			"pool, resource, err := createVaultTestInstance()\n", "",
			"pool.Purge(resource)\n", "",
		}},
	},
}
